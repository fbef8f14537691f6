"""The contenders: ours, torch's own, and the floor that sends nothing.

Each trains one model on one rank's share of the batch, in one of two modes:

    full   what a trainer does: the token count is summed over the ranks before backward, the gradient norm is known and
           clipped, the mean loss of the global batch is known on every rank
    bare   forward, backward, reduction, optimizer step; the count is given, nothing is clipped, no loss is reported

A peer's step is what a careful user of it writes: its loss is scaled so that the average it takes over the ranks is the
sum over the count of the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bench.workload import Share, Workload, kernel_of, named_gradients
from minidist.comm import Meter, World, all_reduce, bind
from minidist.config import CommConfig, Config, ZeroConfig
from minidist.mesh import Mesh
from minidist.parallelize import group_specs, parallelize
from minidist.train.engine import Engine

MODES = ("full", "bare")
# Called when gradients are reduced and not yet clipped, with those this rank holds.
Inspect = Callable[[dict[str, Tensor]], None] | None


@dataclass(frozen=True)
class ContenderContext:
    """What a contender is built from: the workload, the mode and the world of this rank."""

    work: Workload
    mode: str
    world: World

    @property
    def full(self) -> bool:
        return self.mode == "full"


class Contender(Protocol):
    """kernel: of its optimizer. exact: whether it must give the numbers of one process."""

    kernel: str
    exact: bool

    def step(self, share: Share, inspect: Inspect = None) -> tuple[float, float] | None:
        """Train on this rank's share; (loss, gradient norm before clipping) of the global batch, None in mode bare."""


class Ours:
    """minidist's engine, as `minidist train` drives it; in mode bare without its phases count, agree and clip.

    stage: of ZeRO, 0 for plain data parallelism. comm: of `CommConfig`; the backend of the launch when it names none.
    """

    exact = True

    def __init__(self, context: ContenderContext, stage: int = 0, **comm):
        work, self.full, self.steps = context.work, context.full, 0
        config = Config(comm=CommConfig(**comm), optim=work.optim, zero=ZeroConfig(stage))
        mesh, backend = Mesh(dp=context.world.size), comm.get("backend")
        groups = bind(context.world, mesh, group_specs(mesh, config), meter=Meter(keep=False), backend=backend)
        self.engine = Engine(parallelize(work.build(), groups, config), groups, work.optim, work.seed)
        self.kernel = kernel_of(self.engine.optimizer)

    def step(self, share, inspect=None):
        engine, self.steps = self.engine, self.steps + 1
        look = None if inspect is None else lambda: inspect(self.gradients())
        if self.full:
            result = engine.step(self.steps, [share.batch], engine.optim.lr, inspect=look)
            return result.loss, result.grad_norm
        engine.forward_backward.train(self.steps, [share.batch], 1.0, _Known(share.global_count))
        engine.reduce()
        if look:
            look()
        for group in engine.reducer.update_groups():
            engine.reducer.attach_grads(group)
            engine.optimizer.step()
            engine.reducer.copy_to_params(group, self.steps)
        engine.gather()
        engine.reducer.clear()
        return None

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients, gathered from shards if necessary."""
        engine = self.engine
        held, group, whole = engine.reducer.master_specs, engine.groups["loss"], {}
        found, rank = engine.reducer.gradients(), engine.groups.world.rank
        mine = {name: grad for name, grad in found.items() if held[name].owner == rank}
        for name, parameter in engine.parameters.items():
            whole[name], at = torch.zeros(parameter.shape), 0
            for box in held[name].boxes if name in mine else ():
                whole[name][box.slices] = mine[name].flatten()[at : at + box.numel].view(box.shape)
                at += box.numel
            all_reduce(whole[name], group)
        return whole


@dataclass
class _Known:
    """A token count that needs no reduction."""

    value: float


class Floor:
    """No communication: every rank steps alone on its share. What no data parallelism can be faster than."""

    exact = False

    def __init__(self, context: ContenderContext):
        self.work, self.full, self.world, self.size = context.work, context.full, context.world, context.world.size
        self.prepare(self.work.build())
        self.kernel = kernel_of(getattr(self.optimizer, "optim", self.optimizer))  # FairScale's holds torch's
        self.model.train()

    def prepare(self, model: nn.Module) -> None:
        """Set `model`, as it will be called, and `optimizer`."""
        self.model, self.optimizer = model, self.work.adamw(model.parameters())

    def reduce(self, tensor: Tensor, async_op: bool = False):
        return None

    def clip(self) -> float:
        return clip_grad_norm_(self.model.parameters(), self.work.clip_norm).item()

    def gradients(self) -> dict[str, Tensor]:
        return named_gradients(self.model)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, share, inspect=None):
        count, sending = share.global_count, None
        if self.full:
            total = torch.tensor(float(share.batch.count), dtype=torch.float64)
            sending = self.reduce(total, async_op=True)  # in flight during forward
        loss_sum, _ = self.model(share.batch.tokens, share.batch.labels)
        if sending is not None:
            sending.wait()
            count = total.item()
        loss_sum = loss_sum / count
        self.backward(loss_sum * self.size)
        if inspect:
            inspect(self.gradients())
        numbers = None
        if self.full:
            loss = loss_sum.detach().double()
            self.reduce(loss)
            numbers = loss.item(), self.clip()
        self.update()
        return numbers

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Reducing(Floor):
    """A step that asks the other ranks for the count and the loss: what all exact peers have in common."""

    exact = True

    def reduce(self, tensor, async_op=False):
        return dist.all_reduce(tensor, async_op=async_op)


class TorchDDP(Reducing):
    """torch's DistributedDataParallel: the floor's step around its wrapper."""

    def __init__(self, context: ContenderContext, **options):
        self.options = options
        super().__init__(context)

    def prepare(self, model):
        self.optimizer = self.work.adamw(model.parameters())
        self.model = DistributedDataParallel(model, **self.options)
