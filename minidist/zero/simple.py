"""ZeRO (arXiv 1910.02054, section 5) in one file: one dtype, one process group, no communication beside computation."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_gather, all_reduce, reduce_scatter
from minidist.parallel.data.reducer import GradientReducer, trainable_parameters
from minidist.parameters import ParamSpec, flat_boxes, named_parameters


class FlatParameter:
    """Parameters concatenated in one flat buffer, which ends in padding and is cut into one shard per rank.

    parameters: by name; each becomes a view of the buffer. group: rank r has shard r. full: (size * n,), the buffer,
    with the smallest n. shard: (n,), this rank's, a view of it. slices, specs: where in the shard a parameter's
    elements are, and their `ParamSpec`, by name. grad: (n,), this rank's shard of the summed gradient; None at first.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group):
        self.parameters, self.group, self.slices, self.specs, self.grad = dict(parameters), group, {}, {}, None
        self.full = self.flatten(dict(parameters))
        self.shard = self.full.chunk(group.size)[group.rank]
        begin, end, offset = group.rank * len(self.shard), (group.rank + 1) * len(self.shard), 0
        for name, parameter in parameters.items():
            first, offset = offset, offset + parameter.numel()
            parameter.data = self.full[first:offset].view(parameter.shape)
            start, stop = max(first, begin), min(offset, end)
            if start < stop:
                self.slices[name] = slice(start - begin, stop - begin)
                boxes = flat_boxes(parameter.shape, start - first, stop - first)
                self.specs[name] = ParamSpec(name, tuple(parameter.shape), tuple(boxes), (group.ranks[group.rank],))

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Pop the parameters' entries from `tensors` into a new flat buffer; missing ones and padding are zeros."""
        parts = [tensors.pop(name, torch.zeros_like(p)).detach().flatten() for name, p in self.parameters.items()]
        return torch.cat([*parts, parts[0].new_zeros(-sum(map(len, parts)) % self.group.size)])


class ZeroStage1(GradientReducer):
    """Each rank updates its shard of every flat parameter only, and so has optimizer states for this shard only.

    blocks: the layers of `model` in the order of forward, each with the names of the parameters that only it uses.
    flat_params: of the blocks, the last one first, then of all other parameters. masters: slices of this rank's shards
    by name, for the optimizer. ready: names after `mark_ready`. num_reduced: how many flat gradients are reduced.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        others, self.group = trainable_parameters(named_parameters(model)), group
        by_block = [{name: others.pop(name) for name in names if name in others} for names in blocks.values()]
        self.flat_params = [FlatParameter(some, group) for some in [*reversed(by_block), others]]
        self.masters = {name: flat.shard[place] for flat in self.flat_params for name, place in flat.slices.items()}
        self.master_specs = {name: spec for flat in self.flat_params for name, spec in flat.specs.items()}
        self.clear_gradients()
        self._parameters = self.masters  # the tensors with gradients, for the methods of GradientReducer

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: reduce, update and gather. optimizer: of the `masters`."""
        self.finish_reductions()
        optimizer.step()
        self.clear_gradients()
        self.gather_params()

    def accumulate(self, name: str, grad: Tensor) -> None:
        if name in self.ready:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}), when it may have been reduced")
        self.grads[name] = self.grads[name].add_(grad) if name in self.grads else grad
        self.used.add(name)

    def mark_ready(self, name: str) -> None:
        self.ready.add(name)

    def reduce_until(self, number: int) -> None:
        """Collective: reduce the first `number` flat gradients, except those that have been reduced already."""
        for flat in self.flat_params[self.num_reduced : number]:
            self.ready.update(flat.parameters)
            flat_grad, shard = flat.flatten(self.grads), torch.empty_like(flat.shard)
            reduce_scatter(shard, flat_grad, self.group)
            flat.grad = shard if flat.grad is None else flat.grad.add_(shard)
        self.num_reduced = max(self.num_reduced, number)

    def finish_reductions(self) -> None:
        """Collective: reduce all gradients; set `.grad` of the masters, to None for a parameter that no rank used."""
        self.reduce_until(0 if self.reduces_each_micro_batch else len(self.flat_params))
        for flat in self.flat_params:
            uses = torch.tensor([float(name in self.used) for name in flat.parameters], device=flat.full.device)
            all_reduce(uses, self.group)
            used = dict(zip(flat.parameters, uses.tolist(), strict=True))
            for name, place in flat.slices.items():
                self.masters[name].grad = flat.grad[place] if used[name] else None

    def gather_params(self) -> None:
        for flat in reversed(self.flat_params):  # in the order of forward
            all_gather(flat.full, flat.shard, self.group)

    def clear_gradients(self) -> None:
        self.grads, self.used, self.ready, self.num_reduced = {}, set(), set(), 0
        for tensor in (*self.flat_params, *self.masters.values()):
            tensor.grad = None


class ZeroStage2(ZeroStage1):
    """Stage 1 that also reduces the flat gradient of each block, and frees it, when the block's backward is over."""

    reduces_each_micro_batch = True

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        super().__init__(model, blocks, group)
        for number, block in enumerate(reversed(blocks)):  # when its backward begins, that of `number` blocks is over
            block.register_full_backward_pre_hook(lambda *_, number=number: self.reduce_until(number))

    def finish_micro_batch(self, chunk: int | None = None) -> None:
        self.reduce_until(len(self.flat_params))
        self.ready, self.num_reduced = set(), 0


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers the parameters of each block before its forward and backward, and frees them after."""

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        super().__init__(model, blocks, group)
        self.gatherer = self
        for flat, module in zip(self.flat_params, [*reversed(blocks), model], strict=True):
            flat.shard = flat.shard.clone()
            for name, place in flat.slices.items():
                self.masters[name].data = flat.shard[place]
            self.free(flat)
            module.register_forward_pre_hook(lambda *_, flat=flat: self.gather(flat))
            module.register_forward_hook(lambda *_, flat=flat: self.free(flat))
            module.register_full_backward_pre_hook(lambda *_, flat=flat: self.gather(flat))

    def reduce_until(self, number: int) -> None:
        super().reduce_until(number)
        for reduced in self.flat_params[:number]:
            self.free(reduced)

    def gather(self, flat: FlatParameter) -> None:
        """Collective: give the buffer memory again, and all-gather it; its views are valid again."""
        flat.full.untyped_storage().resize_(flat.full.numel() * flat.full.element_size())
        all_gather(flat.full, flat.shard, self.group)

    def free(self, flat: FlatParameter) -> None:
        flat.full.untyped_storage().resize_(0)

    def gather_all(self) -> None:
        for flat in self.flat_params:
            self.gather(flat)

    gather_params = GradientReducer.gather_params  # do nothing: each block is gathered when it runs
