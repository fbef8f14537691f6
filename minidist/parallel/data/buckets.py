"""Gradients reduced in buckets while backward still runs.

Goals: messages as few and as large as overlap allows; the first in flight before backward is half done; no gradient
stored twice. Parameters are laid into flat buffers in the order in which backward computes their gradients, which is
the reverse of the model's. Each gradient is copied into its buffer and freed as soon as it is computed. A bucket whose
gradients are complete is launched at once, but never before the buckets ahead of it: every rank launches in index
order, whatever the order of its autograd. Li et al. 2020 (PyTorch Distributed), section 3.2.3.

The last bucket of a group ends in one element per parameter: the number of ranks that used it, at no extra message.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce
from minidist.parallel.data.assignment import FIRST_BYTES, MIB, assign_buckets
from minidist.parallel.data.reducer import GradientReducer, find_gradient_group
from minidist.parameters import ParamSpecs


class Bucket:
    """The gradients of some parameters in one flat buffer, which is summed over the group by one all-reduce.

    The last bucket of a group also counts, for each parameter in any of the group's buckets, the ranks that have a
    gradient of it. counted_names: the names of these parameters; empty in the other buckets. The buffer ends with one
    element for each: 1 if this rank has a gradient, 0 if not. The all-reduce sums them.
    Attributes: buffer: (numel,), the gradients, then the counts. use_counts: view of the counts. views: view of each
    gradient, in the parameter's shape, by name. handle: of the all-reduce; None before it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group, counted_names: Sequence[str] = ()):
        first = next(iter(parameters.values()))
        numel = sum(parameter.numel() for parameter in parameters.values())
        self.group = group
        self.counted_names = counted_names
        self.buffer = torch.zeros(numel + len(counted_names), dtype=first.dtype, device=first.device)
        self.use_counts = self.buffer[numel:]
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in parameters.items():
            self.views[name] = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.handle: Handle | None = None

    def launch(self, filled: Set[str]) -> None:
        """Collective: start the all-reduce. filled: names of the parameters with a gradient; all others send 0."""
        for name in self.views.keys() - filled:
            self.views[name].zero_()
        if self.counted_names:
            self.use_counts.copy_(torch.tensor([float(name in filled) for name in self.counted_names]))
        self.handle = all_reduce(self.buffer, self.group, async_op=True)


class BucketedReducer(GradientReducer):
    """Gradient reducer of data parallelism that all-reduces gradients in buckets while backward still runs.

    specs: the parameters' specs. groups: these must include the group of each parameter's replicas. bucket_bytes: the
    maximum size of a bucket (a larger parameter has a bucket of its own).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: ParamSpecs,
        groups: Iterable[Group],
        bucket_bytes: int = 25 * MIB,
    ):
        super().__init__(parameters, specs)
        self._bucket_arguments = specs, list(groups), bucket_bytes
        self._allocate_buckets()
        self._start_step()

    def _allocate_buckets(self) -> None:
        """Create the buckets with new buffers, and the table from parameter name to bucket."""
        self._buckets = self._build_buckets(*self._bucket_arguments)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}

    def _build_buckets(self, specs: ParamSpecs, groups: list[Group], bucket_bytes: int) -> list[Bucket]:
        """Return the buckets, in the order of backward; a bucket has parameters of one group, dtype and device."""
        kinds: dict[tuple, tuple[Group, dict[str, int]]] = {}
        for name, parameter in reversed(self._parameters.items()):
            group = find_gradient_group(specs[name], groups)
            _, sizes = kinds.setdefault((group.key, parameter.dtype, parameter.device), (group, {}))
            sizes[name] = parameter.numel() * parameter.element_size()
        buckets = []
        for group, sizes in kinds.values():
            cuts = assign_buckets(sizes, bucket_bytes, FIRST_BYTES)
            for cut in cuts:
                counted_names = list(sizes) if cut is cuts[-1] else []
                buckets.append(Bucket({name: self._parameters[name] for name in cut}, group, counted_names))
        return buckets

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name` in its bucket; the caller may reuse `grad`."""
        if name not in self._awaited:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}): its bucket may be in flight")
        view = self._bucket_of[name].views[name]
        if name in self._filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._filled.add(name)

    def mark_ready(self, name: str) -> None:
        """Declare that all gradients of parameter `name` have been added; launch the buckets that are now complete.

        Buckets are launched in a fixed order: a complete bucket waits for the buckets before it.
        """
        self._awaited.discard(name)
        while self._next < len(self._buckets) and self._awaited.isdisjoint(self._buckets[self._next].views):
            self._launch_next()

    def finish_reductions(self) -> None:
        """Collective: reduce the remaining buckets; set each `.grad` to the sum; None if no rank used the parameter."""
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.handle.wait(host=bool(bucket.counted_names))
        for bucket in self._buckets:
            for name, uses in zip(bucket.counted_names, bucket.use_counts.tolist(), strict=True):
                self._parameters[name].grad = self._bucket_of[name].views[name] if uses else None
        self._start_step()

    def clear_gradients(self) -> None:
        """Drop the gradients of this step; if it was aborted, replace the buffers, which may be in flight."""
        if self._next:  # the step was aborted: buffers in flight must not be reused
            self._allocate_buckets()
        self._start_step()
        super().clear_gradients()

    def scale_gradients(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        for bucket in self._buckets:
            bucket.buffer.mul_(factor)

    def _start_step(self) -> None:
        """Expect the gradients of all parameters again; the next bucket to launch is the first."""
        # Parameters with a gradient; parameters that may still get one; index of the next bucket to launch.
        self._filled: set[str] = set()
        self._awaited = set(self._parameters)
        self._next = 0

    def _launch_next(self) -> None:
        """Launch the next bucket in index order."""
        self._buckets[self._next].launch(self._filled)
        self._next += 1
