"""The contenders without extra dependencies: minidist's two engines, torch DDP, and training without communication.

Each contender trains one model on one rank's part of the batch, in one of two modes:

    full   as a trainer does: sums the token count over the ranks before backward, computes the global gradient norm,
           clips, and returns the mean loss of the global batch on every rank
    bare   forward, backward, gradient reduction, optimizer step; the global token count is known, nothing is clipped,
           no loss is returned

A baseline's step is what a careful user of that library writes: the loss is scaled so that the library's average over
ranks equals the sum over ranks divided by the global token count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bench.workload import RankBatch, Workload, named_gradients, optimizer_kernel
from minidist.comm import Groups, Meter, World, all_reduce, bind
from minidist.config import CommConfig, Config, ZeroConfig
from minidist.mesh import Mesh
from minidist.parallelize import group_specs, parallelize
from minidist.parameters import ParamSpec
from minidist.tools.parity.engines import SimpleParityEngine
from minidist.train.engine import Engine

MODES = ("full", "bare")
NO_COMMUNICATION = "no communication"  # name of the contender `NoCommunication`
# Called with this rank's full gradients after their reduction, before clipping.
InspectGradients = Callable[[dict[str, Tensor]], None] | None


@dataclass(frozen=True)
class ContenderContext:
    """The arguments of a contender's constructor: workload, mode, and this rank's world."""

    work: Workload
    mode: str
    world: World

    @property
    def full(self) -> bool:
        """Whether a step includes token count, clipping and loss: see this module's docstring."""
        return self.mode == "full"


class Contender(Protocol):
    """Interface of a contender. kernel: of its optimizer. exact: whether it must reproduce a single process."""

    kernel: str
    exact: bool

    def step(self, batch: RankBatch, inspect: InspectGradients = None) -> tuple[float, float] | None:
        """Train one step on this rank's batch. inspect: called with the reduced gradients (see `InspectGradients`).

        Returns the loss and the gradient norm before clipping, both of the global batch; None in mode "bare".
        """


class Minidist:
    """minidist's engine as `minidist train` drives it; in mode "bare" without token count, norm and clipping.

    stage: the ZeRO stage; 0 is plain data parallelism. comm: fields of `CommConfig`; `backend` is by default that
    of the launch.
    """

    exact = True

    def __init__(self, context: ContenderContext, stage: int = 0, **comm):
        work, self.full, self.steps = context.work, context.full, 0
        config = Config(comm=CommConfig(**comm), optim=work.optim, zero=ZeroConfig(stage))
        mesh, backend = Mesh(dp=context.world.size), comm.get("backend")
        groups = bind(context.world, mesh, group_specs(mesh, config), meter=Meter(keep=False), backend=backend)
        self.engine = Engine(parallelize(work.build_model(), groups, config), groups, work.optim, work.seed)
        self.kernel = optimizer_kernel(self.engine.optimizer)

    def step(self, batch, inspect=None):
        """Train one step on this rank's batch; see `Contender.step`."""
        engine, self.steps = self.engine, self.steps + 1
        inspect_full = None if inspect is None else lambda: inspect(self.gradients())
        if self.full:
            result = engine.step(self.steps, [batch.batch], engine.optim.lr, on_gradients_reduced=inspect_full)
            return result.loss, result.grad_norm
        engine.forward_backward.run_micro_batches(self.steps, [batch.batch], 1.0, _KnownCount(batch.global_token_count))
        engine.finish_reductions_and_unscale()
        if inspect_full:
            inspect_full()
        for group in engine.reducer.groups_to_update():
            engine.reducer.attach_grads(group)
            engine.optimizer.step()
            engine.reducer.copy_to_params(group, self.steps)
        engine.reducer.gather_params()
        engine.reducer.clear_gradients()
        return None

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients by parameter name, gathered from shards if necessary."""
        reducer = self.engine.reducer
        return _gather_gradients(reducer.gradients(), reducer.master_specs, self.engine.parameters, self.engine.groups)


class SimpleMinidist:
    """minidist's simple engine, as `minidist train --engine simple` drives it, in mode "full" only.

    stage: the ZeRO stage; 0 is plain data parallelism. comm: as in `Minidist`.
    """

    exact = True

    def __init__(self, context: ContenderContext, stage: int = 0, **comm):
        work, self.steps, self.lr = context.work, 0, context.work.optim.lr
        config = Config(model=work.model, comm=CommConfig(**comm), optim=work.optim, zero=ZeroConfig(stage))
        mesh = Mesh(dp=context.world.size)
        specs, backend = SimpleParityEngine.group_specs(mesh, config), comm.get("backend")
        groups = bind(context.world, mesh, specs, meter=Meter(keep=False), backend=backend)
        self.engine = SimpleParityEngine(work.build_model(), groups, config)
        self.kernel = optimizer_kernel(self.engine.engine.optimizer)

    def step(self, batch, inspect=None):
        """Train one step on this rank's batch; see `Contender.step`."""
        self.steps += 1
        inspect_full = (lambda: None) if inspect is None else lambda: inspect(self.gradients())
        result = self.engine.step(self.steps, [batch.batch], self.lr, inspect_full)
        return result.loss, result.grad_norm

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients by parameter name, gathered from shards if necessary."""
        engine = self.engine
        return _gather_gradients(engine.gradients(), engine.master_specs, engine.parameters, engine.groups)


def _gather_gradients(
    shards: Mapping[str, Tensor],
    specs: Mapping[str, ParamSpec],
    parameters: Mapping[str, nn.Parameter],
    groups: Groups,
) -> dict[str, Tensor]:
    """Collective: return the full gradients of all `parameters`, by name. shards: this rank's parts, as in `specs`."""
    rank, group, full = groups.world.rank, groups["control"], {}
    owned = {name: grad for name, grad in shards.items() if specs[name].owner == rank}
    for name, parameter in parameters.items():
        full[name], start = torch.zeros(parameter.shape), 0
        for box in specs[name].boxes if name in owned else ():
            full[name][box.slices] = owned[name].flatten()[start : start + box.numel].view(box.shape)
            start += box.numel
        all_reduce(full[name], group)
    return full


@dataclass
class _KnownCount:
    """A global token count that needs no reduction."""

    value: float


class NoCommunication:
    """Training without communication: a lower bound on the step time of data parallelism.

    Every rank trains alone on its part of the batch. Also the base class of the baselines, which override parts of the
    step.
    """

    exact = False

    def __init__(self, context: ContenderContext):
        self.work, self.full, self.world, self.size = context.work, context.full, context.world, context.world.size
        self.prepare(self.work.build_model())
        self.kernel = optimizer_kernel(getattr(self.optimizer, "optim", self.optimizer))  # FairScale wraps torch's
        self.model.train()

    def prepare(self, model: nn.Module) -> None:
        """Set `self.model`, wrapped by the library, and `self.optimizer`."""
        self.model, self.optimizer = model, self.work.build_adamw(model.parameters())

    def reduce(self, tensor: Tensor, async_op: bool = False):
        """Sum a tensor over all ranks in place; return the handle if `async_op`. Here: do nothing."""
        return None

    def clip(self) -> float:
        """Clip the gradients in place by their global norm; return that norm."""
        return clip_grad_norm_(self.model.parameters(), self.work.clip_norm).item()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's full gradients by parameter name."""
        return named_gradients(self.model)

    def update(self) -> None:
        """Take the optimizer step and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch, inspect=None):
        """Train one step on this rank's batch; see `Contender.step`."""
        count, count_handle = batch.global_token_count, None
        if self.full:
            total = torch.tensor(float(batch.batch.num_loss_tokens), dtype=torch.float64)
            count_handle = self.reduce(total, async_op=True)  # in flight during forward
        loss_sum, _ = self.model(batch.batch.tokens, batch.batch.labels)
        if count_handle is not None:
            count_handle.wait()
            count = total.item()
        loss_sum = loss_sum / count
        self.backward(loss_sum * self.size)
        if inspect:
            inspect(self.gradients())
        loss_and_norm = None
        if self.full:
            loss = loss_sum.detach().double()
            self.reduce(loss)
            loss_and_norm = loss.item(), self.clip()
        self.update()
        return loss_and_norm

    def backward(self, loss: Tensor) -> None:
        """Run backward, including the library's gradient reduction."""
        loss.backward()


class AllReduceContender(NoCommunication):
    """Base class of the baselines: all-reduces the token count and the loss, and must be exact."""

    exact = True

    def reduce(self, tensor, async_op=False):
        return dist.all_reduce(tensor, async_op=async_op)


class TorchDDP(AllReduceContender):
    """torch's DistributedDataParallel. options: keyword arguments of its constructor."""

    def __init__(self, context: ContenderContext, **options):
        self.options = options
        super().__init__(context)

    def prepare(self, model):
        self.optimizer = self.work.build_adamw(model.parameters())
        self.model = DistributedDataParallel(model, **self.options)
