"""One training step, the same on one rank and on many.

The phases, in the order in which `Engine.step` reads:

* count: the number of tokens of the global batch that count, summed over all ranks before the first backward
  (`loss.py`);
* forward and backward: micro-batch by micro-batch, or through the stages of a pipeline (`forward_backward.py`); each
  loss sum is divided by that count, and by nothing else;
* reduce: the gradient reducer completes the reductions that it launched inside backward: this rank then holds the
  gradient of the global batch, or its shards;
* agree: one small vector is summed over all ranks, so that all clip by the same norm, and step, skip or stop together
  (`step_result.py`);
* update: clip, then run the optimizer. No parameter is written before this line;
* merge: if replicas train by themselves, in some steps (`minidist.consistency.merge`);
* gather: under ZeRO every rank has updated its shards; now all ranks get all parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minidist.comm import Groups, all_reduce
from minidist.config import OptimConfig
from minidist.consistency.asynchronous import AsynchronousReducer
from minidist.data.loader import Batch
from minidist.learning_rate import learning_rate
from minidist.parallelize import ParallelModel
from minidist.parameters import named_parameters
from minidist.train.forward_backward import ForwardBackward
from minidist.train.loss import all_reduce_token_count
from minidist.train.optimizer import make_optimizer, set_learning_rate
from minidist.train.step_result import StepResult, agree_on_step


@dataclass(frozen=True)
class Decision:
    """All ranks' decision about a step.

    step: its number, from 0. result: the outcome. use_counts: the argument of `GradientReducer.exclude_unused`.
    """

    step: int
    result: StepResult
    use_counts: tuple[float, ...]


class Engine:
    """Runs training steps and evaluations of a model that is laid out over ranks.

    parallel: the model as `parallelize` returned it. groups: the process groups as `comm.bind` returned them. optim:
    the options of the optimizer, which the engine creates. seed: the seed of dropout.

    Attributes for live recovery after a failed step: completed_steps, the number of steps whose updates the masters and
    optimizer states contain, None during an update; decision, the ranks' last `Decision`.
    """

    def __init__(self, parallel: ParallelModel, groups: Groups, optim: OptimConfig, seed: int):
        self.model = parallel.model
        self.specs = parallel.specs
        self.reducer = parallel.reducer
        self.scaler = parallel.scaler
        self.merger = parallel.merger
        self.groups = groups
        self.optim = optim
        self.parallel = parallel
        self.control = groups["replica" if "replica" in groups else "control"]
        self.parameters = named_parameters(self.model)
        self.forward_backward = ForwardBackward(parallel, groups, seed)
        exchanged = "matrices" in groups  # Muon needs full matrices of sharded parameters
        self.optimizer = make_optimizer(
            optim, self.reducer.masters, self.reducer.master_specs, groups["matrices"] if exchanged else None
        )
        self.worker = self.reducer if isinstance(self.reducer, AsynchronousReducer) else None
        if self.worker is not None:
            self.worker.run_optimizer = lambda step: self._run_optimizer(
                learning_rate(optim, step, self.worker.num_steps), step
            )
        self.completed_steps: int | None = 0
        self.decision: Decision | None = None
        self._awaited_decision: tuple[int, float] | None = None  # step and learning rate

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        lr: float,
        *,
        data_weight: float = 1.0,
        global_tokens: float = 0.0,
        is_stop_requested: Callable[[], bool] = lambda: False,
        checkpoint_written: bool = True,
        regroup_requested: bool = False,
        on_gradients_reduced: Callable[[], None] | None = None,
    ) -> StepResult:
        """Collective: train on this rank's part of the global batch of step number `step`; return the outcome.

        step: from 0. micro_batches: this rank's. lr: the learning rate. data_weight: the weight of this rank's data in
        the loss. global_tokens: of an asynchronous worker, the weighted number of tokens of the global batch.
        is_stop_requested: returns whether this rank asks for the end of the run; called when the gradients are reduced.
        checkpoint_written: whether this rank has written its file of the checkpoint in flight. regroup_requested:
        whether this rank asks to continue with more ranks. on_gradients_reduced: called before the gradients are
        clipped. Raises CommError if a collective failed; if that was before the ranks' decision, no rank has updated
        its masters.
        """
        self.model.train()
        if self.worker is not None:
            self.worker.begin_step(step)
        micro_batches = self.forward_backward.shard_sequences(micro_batches)
        count = all_reduce_token_count(
            [batch.num_loss_tokens for batch in micro_batches], data_weight, self.groups["loss"]
        )
        loss = self.forward_backward.run_micro_batches(step, micro_batches, data_weight, count)
        with self.groups.meter.span("reduce"):
            self.finish_reductions_and_unscale()
        self._awaited_decision = step, lr
        result = self._decide_step(step, loss, count.value, is_stop_requested(), checkpoint_written, regroup_requested)
        if on_gradients_reduced is not None:
            on_gradients_reduced()
        self._apply_decision(self.decision, lr)
        merged = False
        if self.merger is not None:
            self.merger.count_step(result)
            with self.groups.meter.span("merge"):
                result, merged = self.merger.merge_if_due(step, result, self.optimizer.state)
        if self.worker is not None:
            with self.groups.meter.span("exchange"):
                share = result.num_tokens / global_tokens if result.update_successful else 0.0
                result = self.worker.exchange(step, share, result)
        if merged or result.update_successful:
            with self.groups.meter.span("gather"):
                gather = self.reducer.after_load if merged else self.reducer.gather_params
                gather()
        self.reducer.clear_gradients()
        return result

    def finish_merge(self, step: int, result: StepResult) -> StepResult:
        """Collective: merge what a failed merge after step `step` (from 0) has left (`ReplicaMerger.unmerged`).

        result: of that step. Returns it with what the replicas have agreed on in the merge.
        """
        with self.groups.meter.span("merge"):
            result, merged = self.merger.merge_rest(step, result, self.optimizer.state)
        if merged:
            self.reducer.after_load()
        return result

    def apply_missed_update(self, decision: Decision) -> None:
        """Apply the update of `decision` if this rank failed while it waited for that decision; otherwise do nothing.

        decision: the last one that any rank of this replica has received. Ranks decide after the reductions of the
        step, so this rank still has its part of the reduced gradients, and can update without communication. Does
        nothing with Muon, whose update exchanges matrices between the ranks.
        """
        if self._awaited_decision is None or self._awaited_decision[0] != decision.step:
            return
        if "matrices" in self.groups:
            return
        if self.scaler is not None and decision.result.num_tokens > 0:
            self.scaler.update(decision.result.overflowed)
        self.reducer.exclude_unused(decision.use_counts)
        self.decision = decision
        self._apply_decision(decision, self._awaited_decision[1])
        if self.merger is not None:
            self.merger.count_step(decision.result)
            self.merger.unmerged = self.merger.due_fragments(decision.step)

    def _apply_decision(self, decision: Decision, lr: float) -> None:
        """Update this rank's masters as decided. Communicates with Muon only. lr: the learning rate."""
        self._awaited_decision = self.completed_steps = None
        if decision.result.update_successful:
            with self.groups.meter.span("optimizer"):
                self.clip_and_update(lr, decision.result.grad_norm, decision.step)
        self.completed_steps = decision.step + 1

    def finish_reductions_and_unscale(self) -> None:
        """Collective: complete the reductions that backward launched; then divide the gradients by the loss scale."""
        self.reducer.finish_reductions()
        if self.scaler is not None:
            self.reducer.scale_gradients(1 / self.scaler.scale)

    def _decide_step(
        self,
        step: int,
        loss: float | Tensor,
        tokens: float,
        stop_requested: bool,
        checkpoint_written: bool,
        regroup_requested: bool,
    ) -> StepResult:
        """Collective: compute the gradient norm, and make one decision for all ranks: step, skip or stop.

        loss: of this rank, in nats. tokens: number of tokens in the global batch. The others as in `step`.
        """
        loss = float(loss) if self.forward_backward.is_loss_counted else 0.0
        with self.groups.meter.span("gradient norm"):
            squared_norm = self._squared_norm()
        control = self.control
        extra_values = [float(checkpoint_written), float(regroup_requested), *self.reducer.used_flags]
        result, (saved_ranks, regroups, *use_counts) = agree_on_step(
            loss, squared_norm, stop_requested, extra_values, tokens, self.scaler, control
        )
        result = replace(result, checkpoint_written=saved_ranks == control.size, regroup_requested=regroups > 0)
        self.decision = Decision(step, result, tuple(use_counts))
        self.reducer.exclude_unused(use_counts)
        if result.is_finite:
            return result
        return replace(result, non_finite_parameters=tuple(self._find_non_finite_parameters()))

    def _squared_norm(self) -> float:
        """Return this rank's part of the squared gradient norm; each element is counted by one of its holders."""
        rank = self.groups.world.rank
        specs = self.specs | self.reducer.master_specs
        grads = [
            grad for name, grad in self.reducer.gradients().items() if grad is not None and specs[name].owner == rank
        ]
        if not grads:
            return 0.0
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return float(torch.stack(torch._foreach_norm(grads, dtype=wide)).double().square().sum())

    def clip_and_update(self, lr: float, grad_norm: float, step: int) -> None:
        """Clip the gradients as torch's `clip_grad_norm_` does, then run the optimizer and copy masters to parameters.

        lr: the learning rate of this step. grad_norm: the global norm. step: the number of the step, from 0, which
        seeds stochastic rounding.
        """
        if self.optim.clip_norm is not None:
            factor = self.optim.clip_norm / (grad_norm + 1e-6)
            if factor < 1.0:
                self.reducer.scale_gradients(factor)
        if self.worker is None:
            self._run_optimizer(lr, step)

    def _run_optimizer(self, lr: float, step: int) -> None:
        """Run the optimizer on all update groups and copy masters to parameters. step: as in `clip_and_update`."""
        set_learning_rate(self.optimizer, lr)
        for update_group in self.reducer.groups_to_update():
            self.reducer.attach_grads(update_group)
            if self.optim.kind == "muon":
                self.optimizer.step(matrices_to_update=self.reducer.names_to_update(update_group))
            else:
                self.optimizer.step()
            self.reducer.copy_to_params(update_group, step)

    def evaluate(
        self,
        batches: Sequence[Batch],
        batches_at_once: int | None = None,
        is_stop_requested: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Collective: return the mean token loss of all ranks' batches, in nats; NaN without any token.

        batches: this rank's, no larger than its micro-batches in training, so that evaluation needs no more memory.
        Returns None if any rank asks for the end of the run before the last batch: `is_stop_requested` is called after
        every `batches_at_once` batches (None: after all). Leaves the model in evaluation mode.
        """
        self.model.eval()
        loss_sum = count = 0.0
        at_once = batches_at_once or len(batches) or 1
        for start in range(0, len(batches), at_once):
            sums = self.forward_backward.sum_losses_and_tokens(batches[start : start + at_once])
            sums.append(float(is_stop_requested()))
            total = torch.tensor(sums, dtype=torch.float64, device=self.groups.world.control_device)
            all_reduce(total, self.groups["control"], async_op=True).wait(host=True)
            part_sum, part_count, stops = total.tolist()
            loss_sum = loss_sum + part_sum
            count = count + part_count
            if stops and start + at_once < len(batches):
                return None
        return loss_sum / count if count else math.nan

    def _find_non_finite_parameters(self) -> list[str]:
        """Return the names of the parameters, in the model's order, whose local value or gradient is non-finite."""
        values = self.reducer.checkpoint_tensors()
        gradients = self.reducer.gradients()
        seen = {name: (values.get(name), gradients.get(name)) for name in self.parameters}
        return [name for name, pair in seen.items() if any(t is not None and not t.isfinite().all() for t in pair)]
