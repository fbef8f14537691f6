"""One training step, the same on one rank and on many.

The phases, in the order in which `Engine.step` reads:

* count: how many tokens of the global batch count, one number for all ranks, before the first backward (`loss.py`);
* forward and backward: micro-batch by micro-batch, or through the stages of a pipeline (`passes.py`); each loss sum is
  divided by that count, and by nothing else;
* reduce: the sink ends what it began inside backward: this rank has the gradient of the global batch, or its shards;
* agree: one small vector is summed over all ranks, so that all clip alike and step, skip or stop together
  (`agree.py`);
* update: clip, then the optimizer. No parameter is written before this line;
* gather: where every rank has updated its shard, all get the parameters of all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minidist.comm import Groups, all_reduce
from minidist.config import OptimConfig
from minidist.data.loader import Batch
from minidist.parallelize import Parallel
from minidist.parameters import named_parameters
from minidist.train.agree import StepResult, agree
from minidist.train.forward_backward import Passes
from minidist.train.loss import count_tokens
from minidist.train.optimizer import make_optimizer, set_learning_rate


class Engine:
    """A model laid out over ranks, its optimizer, and the step.

    parallel: the model as `parallelize` made it; groups: those `bind` made; seed: of dropout.
    """

    def __init__(self, parallel: Parallel, groups: Groups, optim: OptimConfig, seed: int):
        self.model, self.specs = parallel.model, parallel.specs
        self.sink, self.updates = parallel.sink, parallel.updates
        self.groups, self.optim, self.scaler = groups, optim, parallel.scaler
        self.parameters = named_parameters(self.model)
        self.passes = Passes(parallel, groups, seed)
        self.optimizer = make_optimizer(optim, self.updates.masters, self.updates.held)

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        lr: float,
        *,
        weight: float = 1.0,
        stop: bool = False,
        inspect: Callable[[], None] | None = None,
    ) -> StepResult:
        """Train on this rank's part of the global batch of step number `step`.

        weight: w_i of this rank's data; stop: whether this rank asks for the end of the run; inspect: called when the
        gradients are reduced and not yet clipped. Raises CommError when the ranks could not agree: nothing was updated.
        """
        self.model.train()
        micro_batches = self.passes.own(micro_batches)
        count = count_tokens([batch.count for batch in micro_batches], weight, self.groups["loss"])
        loss = self.passes.train(step, micro_batches, weight, count)
        self.reduce()
        result = self.agree(loss, count.value, stop)
        if inspect is not None:
            inspect()
        if result.applied:
            with self.groups.meter.span("optimizer"):
                self.update(lr, result.grad_norm, step)
            self.gather()
        self.sink.clear()
        return result

    def reduce(self) -> None:
        """End the reduction that backward began, and undo the scale of the loss."""
        self.sink.finish()
        if self.scaler is not None:
            self.sink.scale(1 / self.scaler.scale)

    def agree(self, loss: float | Tensor, tokens: float, stop: bool) -> StepResult:
        """Decide with all ranks how the step ends."""
        loss = float(loss) if self.passes.counts_loss else 0.0
        with self.groups.meter.span("gradient norm"):
            squared_norm = self._squared_norm()
        reports, control = self.updates.reports, self.groups["control"]
        result, uses = agree(loss, squared_norm, stop, reports, tokens, self.scaler, control)
        self.updates.settle(uses)
        return result if result.finite else replace(result, not_finite=tuple(self.not_finite()))

    def _squared_norm(self) -> float:
        """This rank's part of the squared gradient norm: each element counts on one of those that hold it."""
        rank, held = self.groups.world.rank, self.updates.held
        grads = [
            grad for name, grad in self.updates.gradients().items() if grad is not None and held[name].owner == rank
        ]
        if not grads:
            return 0.0
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return float(torch.stack(torch._foreach_norm(grads, dtype=wide)).double().square().sum())

    def update(self, lr: float, grad_norm: float, step: int) -> None:
        """Clip to the global norm, then step. The factor is that of torch's `clip_grad_norm_`."""
        if self.optim.clip_norm is not None:
            factor = self.optim.clip_norm / (grad_norm + 1e-6)
            if factor < 1.0:
                self.sink.scale(factor)
        set_learning_rate(self.optimizer, lr)
        for _ in self.updates.rounds(step):
            self.optimizer.step()

    def gather(self) -> None:
        """Let every rank have the parameters that others updated."""
        self.updates.gather()

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss in nats over the counted tokens of all ranks' batches. Every rank gets the same number."""
        self.model.eval()
        sums = self.passes.evaluate(batches)
        total = torch.tensor(sums, dtype=torch.float64, device=self.groups.world.control_device)
        all_reduce(total, self.groups["control"], async_op=True).wait(host=True)
        loss_sum, count = total.tolist()
        return loss_sum / count if count else math.nan

    def not_finite(self) -> list[str]:
        """Names of the parameters, in the order of the model, whose value or gradient here is not finite."""
        stored, gradients = self.updates.stored(), self.updates.gradients()
        seen = {name: (stored.get(name), gradients.get(name)) for name in self.parameters}
        return [name for name, pair in seen.items() if any(t is not None and not t.isfinite().all() for t in pair)]
