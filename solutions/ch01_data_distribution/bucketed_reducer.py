"""Buckets that overlap with backward: the solution, as it stands in minidist.simple.data_parallel.

A message costs about the same for one number and for ten thousand, so gradients share buckets, which need no extra
memory: the gradients are stored in them, and `.grad` is a view. Backward finishes the last layer first, and from then
on there is something to send. Communication during backward costs no extra time as long as it ends before backward
does. Waiting right after a launch loses this overlap, and so does launching at the end. The values are the same in
all cases, which is why the check looks at the order of events.

If each rank launched buckets in its own order, a collective would pair different buckets: the run would hang, or add
unrelated gradients. Index order costs a little overlap and needs no agreement. A rank that did not use a parameter,
or that has fewer micro-batches than its peers, sends what it has when backward is over.

Usual wrong answers:
* launches all buckets after backward
* the package's own
* sets all gradients to ones
* sends a copy of every bucket, so the gradients need twice the memory
* divides by the number of ranks, although every loss is already divided
* allocates the buckets in the dtype of the parameters, which rounds what the masters exist for
* reduces every micro-batch on its own
* counts elements against bucket_bytes, so buckets are several times too large
* zeroes a bucket for the next step while it is in flight
* launches a bucket after its first micro-batch, and the other ones write into it in flight
* leaves out the last micro-batch, on four ranks only
* keeps the handles, so the next step launches nothing
* allocates the buckets in torch's default dtype
* takes a bucket for complete when the gradient of its last name has been added
* wrong on the third rank only
* fills no bucket up to bucket_bytes itself
* does not reset its count of missing gradients in clear, so the step after an aborted one launches too early
* reads the sums without waiting
* replaces the views by sums of their own, so the buckets stay zero
* waits in finish for each remaining bucket before it launches the next
* ignores bucket_bytes
* launches a bucket when the first gradient of the next one comes
* copies every bucket into the same buffer, which is overwritten while it is in flight
* one all-reduce per parameter instead of one per bucket
* each rank launches a bucket as soon as it is complete, not in index order
* fills the buckets in the order of the model: the first one is complete when backward is over
* launches only the bucket of the parameter that has just been added, not those that waited for it
* reduces every bucket a second time, for no purpose
* limits the first bucket to 1 MiB, whatever bucket_bytes is
* the all-reduce is synchronous
* gives two parameters of a bucket each other's places on odd ranks
* a rank leaves out the buckets of which it used nothing, and the other ranks wait for it
* never launches an incomplete bucket, and the other ranks wait for ever
* waits right after each launch, so nothing overlaps
* waits for the last bucket only, although an earlier one may finish later
* sets all gradients to zeros
"""

from torch import Tensor

from minidist.comm import Handle, all_reduce
from minidist.simple.data_parallel import NaiveReducer, assign_buckets


class BucketedReducer(NaiveReducer):
    """Gradient reducer that all-reduces flat buckets of several gradients, each while backward computes the next ones.

    bucket_bytes: maximum size of a bucket. buckets: the names in each, and its flat tensor, (numel of its gradients,).
    handles: of the all-reduces in flight, which are those of the first buckets.
    """

    def __init__(self, *args, bucket_bytes: int = 25 << 20, **options):
        self.bucket_bytes = bucket_bytes
        super().__init__(*args, **options)

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the buckets; return each parameter's view of its bucket, by name, in the parameter's shape."""
        self.buckets: list[tuple[list[str], Tensor]] = []
        self.handles: list[Handle] = []
        sums = {}
        # Backward computes gradients in about the reverse order of the model.
        sizes = {name: self.masters[name].nbytes for name in reversed(self.parameters)}
        for names in assign_buckets(sizes, self.bucket_bytes):
            masters = [self.masters[name] for name in names]
            numels = [master.numel() for master in masters]
            flat = masters[0].new_zeros(sum(numels))
            self.buckets.append((names, flat))
            for name, master, part in zip(names, masters, flat.split(numels), strict=True):
                sums[name] = part.view(master.shape)
        return sums

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; then start the all-reduces of all buckets that are complete, in their order.

        None is launched before those ahead of it. If ranks completed their buckets in different orders and launched
        them as they come, two ranks would wait for different buckets.
        """
        super().add(name, gradient)
        for names, flat in self.buckets[len(self.handles) :]:
            if any(self.num_added[each] < self.num_micro_batches for each in names):
                break
            self.handles.append(all_reduce(flat, self.group, async_op=True))

    def reduce_sums(self) -> None:
        """Collective: start the remaining all-reduces, and wait for all of them."""
        self.handles += [all_reduce(flat, self.group, async_op=True) for _, flat in self.buckets[len(self.handles) :]]
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
