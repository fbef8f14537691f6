"""Launch buckets during backward.

One flat buffer can be sent only when backward is over. Write a gradient reducer with several flat buffers, the buckets,
and all-reduce each bucket as soon as its last gradient is ready, while backward still computes the others.

OverlappedReducer inherits from FlatReducer, the solution of flat_reducer. Its allocate_sums() makes one FlatBuffer per
list of names that your assign_names() returns, in that order in self._buffers; a FlatBuffer has names, group and
handle, which is None until launch(). The inherited accumulate() and mark_ready() fill the sets self._used and
self._ready with names. Hooks call mark_ready() when backward has computed a gradient (register_gradient_hooks).
bucket_bytes: the largest size of a bucket; a larger parameter has a bucket of its own.
Example: float32 parameters embed (8, 4), w1 (4, 4), b1 (4,), w2 (4, 4), head (4, 6) with bucket_bytes=100:
    buckets   [head], [w2, b1], [w1], [embed] of 96, 80, 64 and 128 bytes, the last one too large to share
    backward  head ready -> launch 0; w2 ready; b1 ready -> launch 1; w1 ready -> launch 2; embed ready -> launch 3
    a rank whose b1 is ready first waits for head, as all ranks must launch in one order: 0, 1, 2, 3

Checked: everything that flat_reducer checks; each bucket launched as soon as it and those before it are complete, and
none waited for before finish_reductions(); the same order of launches on ranks that compute in different orders; one
message per bucket; peak memory of one copy of the gradients; that nothing writes to a bucket in flight; and the
gradients of a model with hooks and micro-batches against one process, in float64 on 1 to 4 ranks.

You may call:
    super().assign_names()   the names of each process group, in the order in which backward computes their gradients
    assign_buckets(sizes, limit)   lists of consecutive names of {name: bytes}; Tensor.nbytes: bytes of a tensor
    buffer.launch(self._used)   starts the all-reduce of a FlatBuffer and sets buffer.handle
    self.wait_and_set_grads()   waits for all buffers, sets .grad, and sets each buffer.handle to None
    super().mark_ready(name), set.issuperset(names)

Check it with: python -m exercises check overlapped_reducer

Stub 1cf157d5.
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
        raise NotImplementedError("remember bucket_bytes, and let FlatReducer do the rest; it calls assign_names()")

    def assign_names(self) -> list[list[str]]:
        """Return the parameter names of each bucket: consecutive ones of one process group."""
        raise NotImplementedError("return the names of each bucket")

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of `name`; launch complete buckets in order: none before those ahead of it."""
        raise NotImplementedError("launch the buckets that are complete, in index order")

    def finish_reductions(self) -> None:
        """Collective: launch the remaining all-reduces, then wait for all of them, and set `.grad`."""
        raise NotImplementedError("launch the remaining buckets, then wait for all and set .grad")

    def clear_gradients(self) -> None:
        if any(buffer.handle for buffer in self._buffers):  # an aborted step: buffers in flight must not be reused
            self._sums = self.allocate_sums()
        super().clear_gradients()
