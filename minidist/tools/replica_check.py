"""The observer that compares replicas: which tensors are replicated, and what a run does when they differ.

Replicas that train separately (modes local, diloco and gossip) differ between averagings: then only the ranks inside a
replica are compared. Tensors that an averaging has made equal are compared over all replicas before the next step, and
DiLoCo's outer states, which only averagings change, in every check.
"""

from collections.abc import Iterator

from minidist.errors import RunError
from minidist.tools.replica_digest import ReplicaCheck, ReplicatedTensor, format_differences
from minidist.train.checkpoint_state import OPTIMIZER, PARAMETERS
from minidist.train.engine import Engine
from minidist.train.observer import Observer
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer


class ReplicaCheckObserver(Observer):
    """Observer that compares the replicas every `fault.digest_every` steps and before every checkpoint.

    If replicas train separately, the masters of each fragment are also compared after its first averaging at or after
    such a step. A run whose replicas differ ends with a RunError, or goes on if `fault.repair` could make them equal.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Remember the present step as the last at which the replicas were equal."""
        self._check, self._checked_step = ReplicaCheck(trainer.control, trainer.progress.step), None
        self._fragments_to_compare: set[int] = set()  # of all replicas, as soon as a merge has made them equal

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Collective: compare the replicas if it is time to."""
        merger, is_due = trainer.engine.merger, trainer.progress.step % trainer.config.fault.digest_every == 0
        if is_due and merger is not None:
            self._fragments_to_compare.update(range(trainer.config.consistency.fragments))
        equal = self._fragments_to_compare & (merger.equal_fragments if merger is not None else set())
        self._fragments_to_compare -= equal
        if is_due or equal:
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

    With ZeRO, a shard has replicas in other shard groups only. ZeRO-3 has no full parameters between steps. If replicas
    train separately, a tensor that is equal in all replicas now is compared over all of them, any other within its own
    replica.
    """
    reducer, states, merger = engine.reducer, engine.optimizer.state, engine.merger

    def equal_ranks(name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        # ranks: inside one replica
        return _ranks_in_all_replicas(engine, ranks) if merger is not None and merger.is_equal(name) else ranks

    tensors, memory = reducer.checkpoint_tensors(), set()
    for name, parameter in engine.parameters.items() if reducer.gatherer is None else ():
        memory.add(parameter.untyped_storage().data_ptr())
        yield ReplicatedTensor(f"{PARAMETERS}/{name}", parameter, equal_ranks(name, engine.specs[name].replicas))
    for name, spec in reducer.master_specs.items():
        if tensors[name].untyped_storage().data_ptr() not in memory:  # otherwise part of a parameter
            yield ReplicatedTensor(f"masters/{name}", tensors[name], equal_ranks(name, spec.replicas))
        for key, value in states.get(reducer.masters.get(name), {}).items():
            if value is not None:
                yield ReplicatedTensor(f"{OPTIMIZER}{key}/{name}", value, spec.replicas)
    holders = engine.groups.mesh.ranks(("dp", "cp", "tp"), engine.groups.world.rank)
    for name, buffer in engine.model.named_buffers():
        yield ReplicatedTensor(f"buffers/{name}", buffer, holders)
    for kind, name, tensor in () if merger is None else merger.outer_states():
        ranks = _ranks_in_all_replicas(engine, reducer.master_specs[name].replicas)
        yield ReplicatedTensor(f"{kind}/{name}", tensor, ranks)


def _ranks_in_all_replicas(engine: Engine, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for ranks of one replica, the ranks with the same coordinates in all replicas; ascending."""
    mesh, num_replicas = engine.groups.mesh, engine.groups["outer"].size
    size = mesh.dp // num_replicas  # data-parallel ranks of a replica
    places = [mesh.coords(rank) for rank in ranks]
    found = [
        mesh.rank(**place | {"dp": place["dp"] % size + replica * size})
        for place in places
        for replica in range(num_replicas)
    ]
    return tuple(sorted(found))


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
