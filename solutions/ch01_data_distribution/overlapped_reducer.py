"""Launch buckets during backward: the solution, as it stands in minidist.parallel.data.simple.

Backward finishes the last layer first, and from then on there is something to send. Communication during backward
costs no extra time as long as it ends before backward does. Waiting right after a launch loses this overlap, and so
does launching at the end. The values are the same in all cases, which is why the check looks at the order of events.

If each rank launched buckets in its own order, a collective would pair different buckets: the run would hang, or add
unrelated gradients. Index order costs a little overlap and needs no agreement. A rank that did not use a parameter
sends zeros for it. After the all-reduce each bucket says how many ranks used each of its parameters, so one that no
rank used keeps .grad None.

Usual wrong answers:
* adds a gradient that comes after mark_ready() to a bucket in flight
* launches all buckets after backward
* the package's own
* sets all gradients to ones
* sends a copy of every bucket, so the gradients need twice the memory
* after an aborted step, goes on counting down
* divides by the number of ranks, although every loss is already divided
* zeroes a bucket for the next step while it is in flight
* fills buckets across the boundary between process groups
* allocates the buckets in torch's default dtype
* begins a step with the sums of the one before
* takes a bucket for complete when its last name is ready
* wrong on the third rank only
* launches a bucket when each of its parameters has a gradient, also in an earlier micro-batch
* closes a bucket after the gradient that passes the limit, not before it
* reads the sums without waiting
* waits for each bucket before it launches the next
* ignores bucket_bytes
* launches a bucket when the first gradient of the next one is ready
* copies every bucket into the same buffer, which is overwritten while it is in flight
* one all-reduce per parameter instead of one per bucket
* each rank launches a bucket as soon as it is complete, not in index order
* fills the buckets in the order of the model: the first one is complete when backward is over
* launches only the bucket of the parameter that became ready, not those that waited for it
* takes the ready parameters for the used ones
* reduces every bucket a second time, for no purpose
* the all-reduce is synchronous
* a rank decides alone whether a parameter was used
* a parameter that no rank used gets a gradient of zeros
* a missing gradient keeps the sum of the previous step
* never launches an incomplete bucket, and the other ranks wait for ever
* waits right after each launch, so nothing overlaps
* waits for the last bucket only, although an earlier one may finish later
* waits for a bucket before it launches the next one
* finishes the step inside the last hook, and a second time in finish_reductions()
* sets all gradients to zeros
"""

from collections.abc import Collection, Mapping

from torch import nn

from minidist.comm import Group
from minidist.parallel.data.assignment import assign_buckets
from minidist.parallel.data.simple import FlatReducer
from minidist.parameters import ParamSpecs


class OverlappedReducer(FlatReducer):
    """Gradient reducer with buckets: flat buffers of at most `bucket_bytes`, all-reduced while backward still runs."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Collection[Group], bucket_bytes: int
    ):
        self._bucket_bytes = bucket_bytes
        super().__init__(parameters, specs, groups)

    def assign_names(self) -> list[list[str]]:
        """Return the parameter names of each bucket: consecutive ones of one process group."""
        sizes = [{name: self._parameters[name].nbytes for name in names} for names in super().assign_names()]
        return [bucket for each in sizes for bucket in assign_buckets(each, self._bucket_bytes)]

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of `name`; launch complete buckets in order: none before those ahead of it."""
        super().mark_ready(name)
        for buffer in self._buffers:
            if not self._ready.issuperset(buffer.names):
                break
            if buffer.handle is None:
                buffer.launch(self._used)

    def finish_reductions(self) -> None:
        """Collective: launch the remaining all-reduces, then wait for all of them, and set `.grad`."""
        for remaining in [buffer for buffer in self._buffers if buffer.handle is None]:
            remaining.launch(self._used)
        self.wait_and_set_grads()

    def clear_gradients(self) -> None:
        if any(buffer.handle for buffer in self._buffers):  # an aborted step: buffers in flight must not be reused
            self._sums = self.allocate_sums()
        super().clear_gradients()
