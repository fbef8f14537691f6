"""A small model trained under a ZeRO stage on every rank, and the same training on one process, both in float64."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exercises.conditions import Choices, Declaration
from exercises.expected_shards import shard_elements
from exercises.testing import Wrong, expect
from minidist.comm import Group, all_gather_object

ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
TOLERANCE = 1e-11  # float64; another order of the sum over the ranks, times lr / eps
LAYERS, MICRO_BATCHES, SAMPLES = 3, 2, 9
WIDTH = 1170  # of a block of 64 KiB
KIB = 1024


class Block(nn.Module):
    """A residual block, 3 -> width -> 3 features; 39 parameters if the width is 5."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(3, width), nn.Linear(width, 3), nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """Three blocks with parameters before, after and beside them; 39, 39, 39 and 23 elements.

    rare: used by a batch only if its first number is positive, which one rank's is in one micro-batch of each step.
    never: not used.
    """

    def __init__(self, seed: int, width: int = 5):
        super().__init__()
        self.first, self.layers = nn.Linear(2, 3), nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head, self.rare, self.never = nn.Linear(3, 2), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.first(data)
        for layer in self.layers:
            hidden = layer(hidden)
        out = self.head(hidden)
        return out + self.rare * data.sum() if len(data) and data[0, 0] > 0 else out


def flat_parameters(model: Net) -> dict[str, Tensor]:
    """Return views of the parameters, each with one dimension, by name."""
    return {name: parameter.detach().view(-1) for name, parameter in model.named_parameters()}


def names_by_block(model: Net) -> list[list[str]]:
    """Return the parameter names of each flat parameter: by block in the order of forward, then all others."""
    names = [name for name, _ in model.named_parameters()]
    blocks = [[name for name in names if name.startswith(f"layers.{index}.")] for index in range(LAYERS)]
    return [*blocks, [name for name in names if not name.startswith("layers.")]]


def blocks_of(model: Net) -> dict[nn.Module, list[str]]:
    """Return the parameter names of each block, by module."""
    return dict(zip(model.layers, names_by_block(model)[:-1], strict=True))


def batches(step: int, rank: int, size: int, count: int = MICRO_BATCHES) -> list[Tensor]:
    """Return a rank's micro-batches of a step, of unequal sizes.

    With three ranks or more, rank 0 has no sample in step 1.
    """
    data = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)
    data[:, 0] = -data[:, 0].abs()
    data[-1, 0] *= -1
    idle = size > 2 and step == 1
    mine = data[:0] if idle and rank == 0 else data[:-1][rank - idle :: size - idle]
    return [*mine.tensor_split(count - 1), data[-1:] if rank == size - 1 else data[:0]] if count > 1 else [mine]


def loss_of(model: Net, data: Tensor) -> Tensor:
    """Return this batch's part of the mean loss over SAMPLES samples."""
    return (model(data) ** 2).sum() / SAMPLES


class Replica:
    """A model on this rank under a ZeRO stage, with an optimizer of its masters.

    stage: the class, which is called with `options`. Every rank's model starts from other values, if not starts_equal.
    """

    runs_empty = False  # whether a rank without samples runs forward and backward as well: in stage 3, which gathers
    starts_equal = False

    def __init__(self, stage: type, group: Group, width: int = 5, **options):
        self.group, self.model = group, Net(0 if self.starts_equal else group.rank, width)
        parameters = dict(self.model.named_parameters())
        self.zero = stage(parameters, parameters, blocks_of(self.model), group, **options)
        self.optimizer = torch.optim.AdamW(list(self.zero.masters.values()), **ADAMW)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear | Block):
                module.register_forward_pre_hook(lambda *_, m=module, n=name: expect_memory(m, f"the forward of {n}"))
                if name != "first":  # torch warns of a backward hook where no input requires a gradient
                    module.register_full_backward_pre_hook(
                        lambda *_, m=module, n=name: expect_memory(m, f"the backward of {n}")
                    )
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Pass a gradient to ZeRO as soon as autograd has accumulated it."""
        gradient, parameter.grad = parameter.grad, None
        self.zero.add(name, gradient)

    def run_backward(self, step: int, count: int = MICRO_BATCHES) -> None:
        """Run the forward and backward of all micro-batches of a step, as the trainer does."""
        self.zero.clear()
        self.zero.gather_root()
        for data in batches(step, self.group.rank, self.group.size, count):
            if len(data) or self.runs_empty:
                loss_of(self.model, data).backward()
            self.zero.end_micro_batch()

    def train(self, step: int, count: int = MICRO_BATCHES) -> None:
        """Train one step: backward, reduction, update, and the parameters from the masters."""
        self.run_backward(step, count)
        self.zero.finish()
        self.optimizer.step()
        self.zero.update_parameters()


class FullyShardedReplica(Replica):
    """A model under stage 3, whose ranks all run every micro-batch, because they gather parameters together."""

    runs_empty = True


class Reference:
    """All ranks' models in one process, without sharding; every element starts as on the rank whose shard has it.

    gathers_first: whether the ranks have each other's shards before the first step, as in stage 3.
    """

    def __init__(self, size: int, gathers_first: bool = False):
        self.models, self.size = [Net(rank) for rank in range(size)], size
        self.model = Net(0)
        values = [flat_parameters(model) for model in self.models]
        own = flat_parameters(self.model)
        for names in names_by_block(self.model):
            sizes = {name: own[name].numel() for name in names}
            for rank, shard in enumerate(shard_elements(sizes, size)):
                for name, index in filter(None, shard):
                    own[name][index] = values[rank][name][index]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        if gathers_first:
            self._gather()

    def gradients(self, step: int, count: int = MICRO_BATCHES) -> dict[str, Tensor | None]:
        """Return the gradients of a step, summed over micro-batches and ranks; None if no rank uses the parameter."""
        total: dict[str, Tensor | None] = {name: None for name, _ in self.model.named_parameters()}
        for rank, model in enumerate(self.models):
            model.zero_grad(set_to_none=True)
            for data in batches(step, rank, self.size, count):
                if len(data):
                    loss_of(model, data).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] = parameter.grad + (0 if total[name] is None else total[name])
        return total

    def train(self, step: int, count: int = MICRO_BATCHES) -> None:
        """Train one step in one process."""
        parameters = dict(self.model.named_parameters())
        for name, gradient in self.gradients(step, count).items():
            parameters[name].grad = gradient
        self.optimizer.step()
        self._gather()

    def values(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _gather(self) -> None:
        """Copy the parameters to the models of all ranks."""
        for model in self.models:
            model.load_state_dict(self.model.state_dict())


def own_elements(size: int, rank: int, model: Net) -> dict[str, list[int]]:
    """Return the elements of each parameter that are in a rank's shards, by name."""
    found: dict[str, list[int]] = {}
    parameters = dict(model.named_parameters())
    for names in names_by_block(model):
        for name, index in filter(None, shard_elements({n: parameters[n].numel() for n in names}, size)[rank]):
            found.setdefault(name, []).append(index)
    return found


def padded_elements(size: int, model: Net) -> list[int]:
    """Return the length of each flat parameter, in elements."""
    parameters = dict(model.named_parameters())
    numels = [sum(parameters[name].numel() for name in names) for names in names_by_block(model)]
    return [-(-numel // size) * size for numel in numels]


def expect_memory(module: nn.Module, when: str) -> None:
    """Fail if the storage of one of a module's parameters was freed: reading it would kill the process."""
    if any(parameter.untyped_storage().nbytes() == 0 for parameter in module.parameters()):
        raise Wrong("wrong", f"{when} begins, and its parameters have no memory")


def expect_about(when: str, got: int, wanted: int) -> None:
    """Fail unless both are equal within 30 KiB: three activations of a sample, small parameters, padding."""
    if abs(got - wanted) > 30 * KIB:
        raise Wrong("wrong", f"KiB of tensors {when}", f"about {wanted // KIB}", str(got // KIB), case="2 ranks")


def expect_gradients(replica: Replica, wanted: dict[str, Tensor | None], case: str) -> None:
    """Fail unless each master's `.grad` has this rank's elements of the gradient; None for an unused parameter.

    wanted: as from `Reference.gradients`.
    """
    own = own_elements(replica.group.size, replica.group.rank, replica.model)
    expect("the names of this rank's masters", sorted(replica.zero.masters), sorted(own))
    for name, elements in own.items():
        got, told = replica.zero.masters[name].grad, f"{case}, elements {elements[0]} to {elements[-1]} of {name}"
        if wanted[name] is None:
            expect("the gradient of a parameter that no rank used", got, None, case=told)
            continue
        expected = wanted[name].flatten()[elements]
        if not isinstance(got, Tensor):
            raise Wrong("wrong", "the gradient of the master", str(expected.tolist())[:90], str(got), case=told)
        expect("the gradient of the master", got, expected, case=told, tolerance=TOLERANCE)


@contextlib.contextmanager
def expect_sent(replica: Replica, network, elements: int, case: str) -> Iterator[None]:
    """Fail unless the ranks send (ranks - 1) times `elements` in the block, and besides at most some flags."""
    before, others = len(network.records), replica.group.size - 1
    yield
    sent = sum(all_gather_object(sum(r.wire_bytes for r in network.records[before:]), replica.group))
    least, flags = others * elements * 8, 2 * others * (len(list(replica.model.parameters())) + 8 * LAYERS) * 8
    if not least <= sent <= least + flags:
        told = f"{least} to {least + flags}: (ranks - 1) times the gradients and parameters, and a few flags"
        raise Wrong("wrong", "bytes that all ranks send in a step", told, str(sent), case=case)


def expect_equals_one_process(stage: type, group: Group, world_size: int) -> None:
    """Fail unless all ranks have the parameters of one process after each of three steps. stage: of ZeRO, 1 or 2."""
    mine, one = Replica(stage, group), Reference(world_size)
    for step in range(3):
        mine.train(step)
        one.train(step)
        parameters = dict(mine.model.named_parameters())
        for name, value in one.values().items():
            what, case = f"the parameter {name} after step {step + 1}", "2 micro-batches per step"
            expect(what, parameters[name].detach(), value, case=case, tolerance=TOLERANCE)


def expect_freed(zero: Any, case: str) -> None:
    """Fail if a flat parameter of stage 3 has memory."""
    full = [flat.full.untyped_storage().nbytes() for flat in zero.flat_params]
    expect("bytes of each flat parameter", full, [0] * len(full), case=case)


def expect_step_without_root(stage: type, group: Group, **options) -> None:
    """Fail unless a step works on a pipeline stage all of whose parameters are in blocks. stage: of ZeRO, 2 or 3."""
    case, model = "a pipeline stage without a root", Net(0)
    blocks, own = blocks_of(model), own_elements(group.size, group.rank, model)
    parameters = dict(model.named_parameters())
    inside = {name: parameters[name] for names in blocks.values() for name in names}
    zero = stage(inside, inside, blocks, group, **options)
    for step in range(2):
        zero.clear()
        zero.gather_root()
        for name in reversed(inside):
            zero.add(name, torch.ones_like(inside[name]))
        zero.end_micro_batch()
        zero.finish()
        for name, master in zero.masters.items():
            what = f"the gradient of this rank's master of {name} in step {step + 1}"
            expect(what, master.grad, [float(group.size)] * len(own[name]), case=case)
        zero.update_parameters()
    if zero.shards_parameters:
        zero.gather_block(0, 1)
    zero.free_root()
    if zero.shards_parameters:
        expect_freed(zero, f"{case}, after gather_block(0, 1) and free_root")


def declare_step(make_replica: Callable[[Any, Group, int], Replica], gathers_first: bool = False) -> Declaration:
    """Declare a step of training, whose result is this rank's masters, by name.

    make_replica: (answer, group, width) -> the model on this rank. gathers_first: as of `Reference`.
    """

    def run_step(answer: Any, group: Group, width: int, step: int) -> list[tuple[str, Tensor]]:
        replica = make_replica(answer, group, width)
        replica.train(step)
        return [(name, master.detach().clone()) for name, master in sorted(replica.zero.masters.items())]

    def run_in_one_process(ranks: list[dict[str, Any]], rank: int) -> list[tuple[str, Tensor]]:
        one = Reference(len(ranks), gathers_first)
        with torch.enable_grad():
            one.train(ranks[0]["step"])
        own, values = own_elements(len(ranks), rank, one.model), flat_parameters(one.model)
        return [(name, values[name][own[name]]) for name in sorted(own)]

    return Declaration(
        inputs={"width": Choices((5,)), "step": Choices((0, 1))},
        call=run_step,
        reference=run_in_one_process,
        roundings=1000,  # another order of the sum over the ranks, times lr / eps
    )
