"""Buckets that overlap with backward.

Every message has a fixed cost, and one message for all gradients can be sent only when backward is over. Write a
gradient reducer with several flat buckets, which all-reduces each bucket as soon as its last gradient has been added,
while backward still computes the others.

BucketedReducer inherits from NaiveReducer, the solution of data_parallel: __init__ sets parameters, masters, group,
num_micro_batches and sums, the result of your allocate_sums(); finish() calls your reduce_sums(), then tells the ranks
which parameters are in use and sets `.grad`. add(name, gradient) is called num_micro_batches times per parameter that
this rank uses in all its micro-batches, and fewer times for others. Each step begins with clear(), also after a step
that was aborted before its first bucket was launched. allocate_sums() sets self.buckets and self.handles (see the
class) and returns views of the buckets, which hold the gradients without another copy and may be slices of one tensor.
Limit self.bucket_bytes counts bytes of the masters, in whose dtype all buckets are.
Example: float32 parameters embed (8, 4), w1 (4, 4), b1 (4,), w2 (4, 4), head (4, 6) with bucket_bytes=100:
    buckets   [head], [w2, b1], [w1], [embed] of 96, 80, 64 and 128 bytes, the last one too large to share
    backward  head added -> launch 0; w2 added; b1 added -> launch 1; w1 -> launch 2; embed -> launch 3
    a rank whose b1 is added first waits for head, as all ranks must launch in one order: 0, 1, 2, 3

Checked: everything that data_parallel checks of sums, steps and unused parameters; each bucket launched as soon as it
and those before it are complete, and none waited for before finish(); the same order of launches on ranks that compute
in different orders; one message per bucket; peak memory of one copy of the gradients; that nothing writes to a bucket
in flight; gradients wider than the parameters; and the gradients of a model with hooks and micro-batches against one
process, in float64 on 1 to 4 ranks.

You may call:
    assign_buckets(sizes, limit)   lists of consecutive names of {name: bytes}; Tensor.nbytes: bytes of a tensor
    tensor.new_zeros(n)   n zeros in the dtype and on the device of `tensor`; Tensor.numel()
    tensor.split([2, 1, 3])   views of 2, 1 and 3 consecutive elements; Tensor.view(shape): also a view
    super().add(name, gradient)   adds to self.sums[name] in place, and counts in self.num_added[name]
    all_reduce(tensor, group, async_op=True)   starts the sum in place and returns a Handle; handle.wait()
    reversed(self.parameters), zip(one, other, strict=True), list.clear()

Check it with: python -m exercises check bucketed_reducer

Stub e7dc60f1.
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
        raise NotImplementedError("allocate the buckets; return the views by name")

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; then start the all-reduces of all buckets that are complete, in their order.

        None is launched before those ahead of it. If ranks completed their buckets in different orders and launched
        them as they come, two ranks would wait for different buckets.
        """
        raise NotImplementedError("add the gradient, then launch the buckets that are complete, in index order")

    def reduce_sums(self) -> None:
        """Collective: start the remaining all-reduces, and wait for all of them."""
        raise NotImplementedError("launch the remaining buckets, then wait for all")
