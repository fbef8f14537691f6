"""Launch buckets during backward.

Write the missing lines of Bucket and BucketedReducer; its docstring specifies the result.
You may call: all_reduce, Tensor.zero_, Bucket.launch, Handle.wait, set.isdisjoint.
Check it with: python -m exercises check bucketed_reducer

Stub 603b53bb.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce
from minidist.parallel.data.assignment import FIRST_BYTES, MIB, assign
from minidist.parallel.data.buckets import _Unlaunched
from minidist.parallel.data.reducer import GradientReducer, group_of
from minidist.parameters import ParamSpecs


class Bucket:
    """Some gradients in one flat buffer, which is what goes over the wire.

    reports: parameters whose use this bucket reports, in one element each at the end of the buffer.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group, reports: Sequence[str] = ()):
        first = next(iter(parameters.values()))
        numel = sum(parameter.numel() for parameter in parameters.values())
        self.group, self.reports = group, reports
        self.buffer = torch.zeros(numel + len(reports), dtype=first.dtype, device=first.device)
        self.uses = self.buffer[numel:]
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in parameters.items():
            self.views[name] = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.handle: Handle | _Unlaunched = _Unlaunched(list(parameters))

    def launch(self, filled: Set[str]) -> None:
        """Send what has come; a gradient that did not come counts as zero."""
        raise NotImplementedError("a missing gradient counts as zero")
        if self.reports:
            self.uses.copy_(torch.tensor([float(name in filled) for name in self.reports]))
        raise NotImplementedError("start the all-reduce of the buffer over the group, without waiting")


class BucketedReducer(GradientReducer):
    """All-reduce in buckets, launched inside backward. Same interface and same gradients as `NaiveReducer`.

    bucket_bytes: upper size of a bucket (a larger parameter has one alone).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: ParamSpecs,
        groups: Iterable[Group],
        bucket_bytes: int = 25 * MIB,
    ):
        super().__init__(parameters, specs)
        self._given = specs, list(groups), bucket_bytes
        self._make_buckets()
        self._start_step()

    def _make_buckets(self) -> None:
        self._buckets = self._lay_out(*self._given)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}

    def _lay_out(self, specs: ParamSpecs, groups: list[Group], bucket_bytes: int) -> list[Bucket]:
        """Buckets in backward order, apart by what cannot share a buffer: the group, the dtype and the device."""
        kinds: dict[tuple, tuple[Group, dict[str, int]]] = {}
        for name, parameter in reversed(self._parameters.items()):
            group = group_of(specs[name], groups)
            _, sizes = kinds.setdefault((group.key, parameter.dtype, parameter.device), (group, {}))
            sizes[name] = parameter.numel() * parameter.element_size()
        buckets = []
        for group, sizes in kinds.values():
            cuts = assign(sizes, bucket_bytes, FIRST_BYTES)
            for cut in cuts:
                reports = list(sizes) if cut is cuts[-1] else []
                buckets.append(Bucket({name: self._parameters[name] for name in cut}, group, reports))
        return buckets

    def add(self, name: str, grad: Tensor) -> None:
        """Put a contribution into its place in the bucket; the caller's tensor is free again."""
        if name not in self._awaited:
            raise RuntimeError(f"a gradient of {name} came after ready({name!r}), when its bucket may be on its way")
        view = self._bucket_of[name].views[name]
        if name in self._filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._filled.add(name)

    def ready(self, name: str) -> None:
        """No more will come for `name`: launch what is complete, as far as no bucket ahead is incomplete."""
        self._awaited.discard(name)
        raise NotImplementedError("launch complete buckets in index order")

    def finish(self) -> None:
        """End of backward: launch what is left, then wait. After it every `.grad` holds its sum over the group."""
        raise NotImplementedError("launch the remaining buckets, then wait for all")
        for bucket in self._buckets:
            for name, uses in zip(bucket.reports, bucket.uses.tolist(), strict=True):
                self._parameters[name].grad = self._bucket_of[name].views[name] if uses else None
        self._start_step()

    def clear(self) -> None:
        if self._next:  # the step was broken off: what has been launched still owns its memory
            self._make_buckets()
        self._start_step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def scale(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.buffer.mul_(factor)

    def _start_step(self) -> None:
        # The parameters whose gradient lies in its place, those that may still get more, the first bucket not launched.
        self._filled: set[str] = set()
        self._awaited = set(self._parameters)
        self._next = 0

    def _launch_next(self) -> None:
        """Launch the first bucket that was not launched yet; another is the first one then."""
        raise NotImplementedError("launch bucket `_next`")
