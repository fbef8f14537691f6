"""The observer that compares replicas: which tensors are replicated, and what a run does when they differ."""

from collections.abc import Iterator

from minidist.errors import RunError
from minidist.tools.replica_digest import ReplicaCheck, ReplicatedTensor, format_differences
from minidist.train.agree import StepResult
from minidist.train.checkpoint_state import OPTIMIZER, PARAMETERS
from minidist.train.engine import Engine
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer


class ReplicaCheckObserver(Observer):
    """Observer that compares the replicas every `fault.digest_every` steps and before every checkpoint.

    A run whose replicas differ ends with a RunError, or goes on if `fault.repair` could make them equal.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Remember the present step as the last at which the replicas were equal."""
        self._check, self._checked_step = ReplicaCheck(trainer.control, trainer.progress.step), None

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Collective: every `fault.digest_every` steps, compare the replicas."""
        if trainer.progress.step % trainer.config.fault.digest_every == 0:
            self.before_save(trainer)

    def before_save(self, trainer: Trainer) -> None:
        """Collective: compare the replicas, unless that was done after this step. Raises RunError if they differ."""
        step = trainer.progress.step
        if self._checked_step == step:
            return
        self._checked_step = step
        with trainer.groups.meter.span("replica check"):
            try:
                note = check_replicas(self._check, trainer.engine, step, trainer.config.fault.repair)
            except RunError as error:
                raise RunError(f"{error} {trainer.describe_last_checkpoint()}") from None
        if note is not None:
            trainer.send_note(note)


def replicated_tensors(engine: Engine) -> Iterator[ReplicatedTensor]:
    """Yield this rank's parameters, master weights, optimizer states and buffers, each with the ranks that hold it.

    With ZeRO, a shard has replicas in other shard groups only. ZeRO 3 has no full parameters between steps.
    """
    reducer, states = engine.reducer, engine.optimizer.state
    tensors, memory = reducer.checkpoint_tensors(), set()
    for name, parameter in engine.parameters.items() if reducer.gatherer is None else ():
        memory.add(parameter.untyped_storage().data_ptr())
        yield ReplicatedTensor(f"{PARAMETERS}/{name}", parameter, engine.specs[name].replicas)
    for name, spec in reducer.master_specs.items():
        if tensors[name].untyped_storage().data_ptr() not in memory:  # otherwise part of a parameter
            yield ReplicatedTensor(f"masters/{name}", tensors[name], spec.replicas)
        for key, value in states.get(reducer.masters.get(name), {}).items():
            if value is not None:
                yield ReplicatedTensor(f"{OPTIMIZER}{key}/{name}", value, spec.replicas)
    holders = engine.groups.mesh.ranks(("dp", "cp", "tp"), engine.groups.world.rank)
    for name, buffer in engine.model.named_buffers():
        yield ReplicatedTensor(f"buffers/{name}", buffer, holders)


def check_replicas(check: ReplicaCheck, engine: Engine, step: int, repair: bool) -> str | None:
    """Collective: compare all replicas after step number `step`, from 1; return None if they are equal.

    repair: if replicas differ, overwrite them with the majority's, and return a line about it for the log. Raises
    RunError, the same on all ranks, if replicas differ and `repair` is False or there is no majority.
    """
    since = check.last_equal_step
    found = check.find_differences(step, replicated_tensors(engine))
    if not found:
        return None
    what = f"step {step}: {format_differences(found)}; at step {since} all replicas were equal"
    if any(difference.healthy_rank is None for difference in found):
        raise RunError(f"{what}. Without a majority of equal replicas, nobody knows which of them are right.")
    if not repair:
        raise RunError(f"{what}. --fault.repair would copy the state of the majority and go on.")
    check.repair(found, replicated_tensors(engine))
    if left := check.find_differences(step, replicated_tensors(engine)):
        raise RunError(f"{what}. Copying the state of the majority did not help: {format_differences(left)}.")
    return f"{what}. They are equal again: copied from {', '.join(sorted({f'rank {d.healthy_rank}' for d in found}))}."
