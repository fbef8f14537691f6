"""Data parallelism in one file, for parameters of one dtype that are replicated (no ZeRO).

Each rank computes gradients on its own samples, and a reducer sums them over the replicas. `NaiveReducer` all-reduces
each gradient after backward, `FlatReducer` one flat buffer, and `OverlappedReducer` several of them (buckets) while
backward still runs: `--engine mixed`. `register_gradient_hooks` feeds them. The fast version: `BucketedReducer`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_reduce
from minidist.parallel.data.assignment import assign_buckets
from minidist.parallel.data.reducer import GradientReducer, find_gradient_group
from minidist.parameters import ParamSpecs


class NaiveReducer(GradientReducer):
    """Gradient reducer of data parallelism with one all-reduce per parameter, after backward.

    specs: the parameters' specs. groups: these must include the group of each parameter's replicas.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Collection[Group]):
        super().__init__(parameters, specs)
        self._groups = {name: find_gradient_group(specs[name], groups) for name in self._parameters}
        self._sums = self.allocate_sums()
        self.clear_gradients()

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return a tensor of zeros for the gradient of each parameter, by name, in the parameter's shape."""
        return {name: p.new_zeros(p.shape) for name, p in self._parameters.items()}

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Add a local gradient of parameter `name` to the sum of earlier micro-batches."""
        if name in self._ready:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}): it may be in flight")
        self._sums[name].add_(grad)
        self._used.add(name)

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of parameter `name` in this step."""
        self._ready.add(name)

    def finish_reductions(self) -> None:
        """Collective: all-reduce the gradients; set `.grad` to their sums, to None if no rank used the parameter."""
        for name, parameter in self._parameters.items():
            # Every rank must take part in every collective: one that did not use the parameter sends zeros.
            used = torch.tensor([float(name in self._used)], device=parameter.device)
            all_reduce(self._sums[name], self._groups[name])
            all_reduce(used, self._groups[name])
            parameter.grad = self._sums[name] if used.item() else None

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for total in self._sums.values():
            total.zero_()
        self._used, self._ready = set[str](), set[str]()


@dataclass(eq=False)
class FlatBuffer:
    """The gradients of some parameters in one tensor, which one all-reduce over `group` sums.

    names: of the parameters. tensor: (numel + number of names,): the gradients, then one element per parameter: 1 if
    this rank used it, so after the all-reduce the number of ranks that used it. handle: None unless in flight.
    """

    names: list[str]
    tensor: Tensor
    group: Group
    handle: Handle | None = None

    def launch(self, used: set[str]) -> None:
        """Collective: start the all-reduce. used: names of the parameters that this rank has used."""
        self.tensor[-len(self.names) :] = torch.tensor([float(name in used) for name in self.names])
        self.handle = all_reduce(self.tensor, self.group, async_op=True)


class FlatReducer(NaiveReducer):
    """Gradient reducer of data parallelism with one flat buffer for each process group, all-reduced after backward."""

    def assign_names(self) -> list[list[str]]:
        """Return the parameter names of each flat buffer: in backward order, all of one process group together."""
        names = list(reversed(self._parameters))
        groups = dict.fromkeys(self._groups[name] for name in names)
        return [[name for name in names if self._groups[name] is group] for group in groups]

    def allocate_sums(self) -> dict[str, Tensor]:
        """Allocate the flat buffers; return each parameter's part of its buffer, by name, in the parameter's shape."""
        self._buffers, sums = list[FlatBuffer](), {}
        for names in self.assign_names():
            sizes = [self._parameters[name].numel() for name in names]
            tensor = self._parameters[names[0]].new_zeros(sum(sizes) + len(names))
            for name, part in zip(names, tensor.split([*sizes, len(names)])[:-1], strict=True):
                sums[name] = part.view(self._parameters[name].shape)
            self._buffers.append(FlatBuffer(names, tensor, self._groups[names[0]]))
        return sums

    def finish_reductions(self) -> None:
        """Collective: all-reduce the flat buffers, and set `.grad`."""
        for buffer in self._buffers:  # all of them before the first wait
            buffer.launch(self._used)
        self.wait_and_set_grads()

    def wait_and_set_grads(self) -> None:
        """Wait for the all-reduces of all buffers; set `.grad` to the sums, to None if no rank used the parameter."""
        for buffer in self._buffers:  # the host reads the numbers of uses, so it must wait too
            buffer.handle.wait(host=True)
            buffer.handle = None
            for name, uses in zip(buffer.names, buffer.tensor[-len(buffer.names) :].tolist(), strict=True):
                self._parameters[name].grad = self._sums[name] if uses else None


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
