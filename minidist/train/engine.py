"""One training step, the same on one rank and on many.

The phases, in the order in which `Engine.step` reads:

* count: the number of tokens of the global batch that count, summed over all ranks before the first backward
  (`loss.py`);
* forward and backward: micro-batch by micro-batch, or through the stages of a pipeline (`forward_backward.py`); each
  loss sum is divided by that count, and by nothing else;
* reduce: the gradient reducer completes the reductions that it launched inside backward: this rank then holds the
  gradient of the global batch, or its shards;
* agree: one small vector is summed over all ranks, so that all clip by the same norm, and step, skip or stop together
  (`agree.py`);
* update: clip, then run the optimizer. No parameter is written before this line;
* gather: under ZeRO every rank has updated its shards; now all ranks get all parameters.
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
from minidist.train.forward_backward import ForwardBackward
from minidist.train.loss import count_tokens
from minidist.train.optimizer import make_optimizer, set_learning_rate
from minidist.train.sampling import next_logits


class Engine:
    """Trains a model that is laid out over ranks.

    parallel: the model as `parallelize` returned it. groups: as `bind` returned them. seed: of dropout.
    """

    def __init__(self, parallel: Parallel, groups: Groups, optim: OptimConfig, seed: int):
        self.model, self.specs = parallel.model, parallel.specs
        self.reducer, self.scaler = parallel.reducer, parallel.scaler
        self.groups, self.optim, self._parallel = groups, optim, parallel
        self.parameters = named_parameters(self.model)
        self.forward_backward = ForwardBackward(parallel, groups, seed)
        exchanged = "matrices" in groups  # Muon needs full matrices of sharded parameters
        self.optimizer = make_optimizer(
            optim, self.reducer.masters, self.reducer.master_specs, groups["matrices"] if exchanged else None
        )

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

        weight: w_i of this rank's data. stop: whether this rank asks for the end of the run. inspect: called once
        gradients are reduced, before they are clipped. Raises CommError if the ranks could not agree; then no rank has
        updated anything.
        """
        self.model.train()
        micro_batches = self.forward_backward.cut_sequences(micro_batches)
        count = count_tokens([batch.count for batch in micro_batches], weight, self.groups["loss"])
        loss = self.forward_backward.train(step, micro_batches, weight, count)
        self.reduce()
        result = self.agree(loss, count.value, stop)
        if inspect is not None:
            inspect()
        if result.applied:
            with self.groups.meter.span("optimizer"):
                self.update(lr, result.grad_norm, step)
            self.gather()
        self.reducer.clear()
        return result

    def reduce(self) -> None:
        """Complete the reductions that backward launched, and divide the gradients by the loss scale."""
        self.reducer.finish()
        if self.scaler is not None:
            self.reducer.scale(1 / self.scaler.scale)

    def agree(self, loss: float | Tensor, tokens: float, stop: bool) -> StepResult:
        """Decide together with all ranks whether to step, skip or stop."""
        loss = float(loss) if self.forward_backward.counts_loss else 0.0
        with self.groups.meter.span("gradient norm"):
            squared_norm = self._squared_norm()
        flags, control = self.reducer.used_flags, self.groups["control"]
        result, use_counts = agree(loss, squared_norm, stop, flags, tokens, self.scaler, control)
        self.reducer.mark_unused(use_counts)
        return result if result.finite else replace(result, not_finite=tuple(self.not_finite()))

    def _squared_norm(self) -> float:
        """This rank's part of the squared gradient norm: of the ranks that hold an element, one counts it."""
        rank, specs = self.groups.world.rank, self.reducer.master_specs
        grads = [
            grad for name, grad in self.reducer.gradients().items() if grad is not None and specs[name].owner == rank
        ]
        if not grads:
            return 0.0
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return float(torch.stack(torch._foreach_norm(grads, dtype=wide)).double().square().sum())

    def update(self, lr: float, grad_norm: float, step: int) -> None:
        """Clip to the global norm by the factor of torch's `clip_grad_norm_`, then run the optimizer."""
        if self.optim.clip_norm is not None:
            factor = self.optim.clip_norm / (grad_norm + 1e-6)
            if factor < 1.0:
                self.reducer.scale(factor)
        set_learning_rate(self.optimizer, lr)
        for group in self.reducer.update_groups():
            self.reducer.attach_grads(group)
            self.optimizer.step(**({"names": self.reducer.updated_names(group)} if self.optim.kind == "muon" else {}))
            self.reducer.copy_to_params(group, step)

    def gather(self) -> None:
        """Bring the updated parameters to all ranks."""
        self.reducer.gather()

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss in nats over the counted tokens of all ranks' batches, the same number on every rank.

        batches: of this rank; no larger than its micro-batches in training, so that evaluation needs no more memory.
        """
        self.model.eval()
        sums = self.forward_backward.evaluate(batches)
        total = torch.tensor(sums, dtype=torch.float64, device=self.groups.world.control_device)
        all_reduce(total, self.groups["control"], async_op=True).wait(host=True)
        loss_sum, count = total.tolist()
        return loss_sum / count if count else math.nan

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Compute the logits (b, vocab) of the token that follows `tokens` (b, s); see `sampling.next_logits`."""
        return next_logits(self._parallel, self.groups, tokens)

    def not_finite(self) -> list[str]:
        """The names of the parameters, in the model's order, whose value or gradient on this rank is not finite."""
        values, gradients = self.reducer.checkpoint_tensors(), self.reducer.gradients()
        seen = {name: (values.get(name), gradients.get(name)) for name in self.parameters}
        return [name for name, pair in seen.items() if any(t is not None and not t.isfinite().all() for t in pair)]
