"""Live recovery: when a rank dies the others go on, with the training state from their memory, and admit a new rank.

    join -> connect -> restore -> train, until a rank dies or a new one arrives; then again, in the next generation

A rank that sees an operation fail aborts its process groups, so that all others fail too, and meets them in the next
generation (`membership`). There a new `Trainer` is built over the live ranks, as many replicas as they fill. The
state is that of the newest step of which the ranks hold every element in memory (`replicas`), else that of the
newest checkpoint. The step that failed is then repeated: its global batch is a function of the position in the data, so
the losses are those of a run without failure.

Replicas that differ between merges (local SGD, DiLoCo, gossip) each go on from their own live tensors. A replica that
has lost a rank is missing in the next merge: its tokens since the last one count for nothing. A new replica begins as
replica 0, with a weight of 0. If a death interrupts a merge, the replicas that are left repeat it; a replica that has
not finished a merge which another one has finished begins as that one, as it cannot be merged alone.

A gradient of the failed step never reaches a parameter on one rank only: if the ranks' agreement on the step reached
any rank, every rank updates (`Engine.apply_missed_update`); otherwise none has.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint import folders
from minidist.checkpoint.shards import SavedTensor, TensorShard
from minidist.comm import CommError, Group, Meter, P2POp, World
from minidist.config import Config
from minidist.data.corpus import Corpus, open_corpus
from minidist.errors import UserError, format_ranks
from minidist.fault.signals import StopSignalRecorder
from minidist.tools.recovery.membership import CONNECT_TIMEOUT_S, Death, Generation, Membership
from minidist.tools.recovery.replicas import InMemoryState, LoadedState, MemoryCopies, load_from_memory
from minidist.train import run_folder
from minidist.train.checkpoint_state import (
    checkpoint_shards,
    copy_first_replica,
    create_optimizer_states,
    renumber_replica,
)
from minidist.train.observer import Observer, Recovery, RegroupRequested
from minidist.train.trainer import Trainer
from minidist.validation import validate

_ARRIVALS_EVERY_S = 0.05
_MAX_FAILURES_WITHOUT_STEP = 3


def train_with_recovery(
    world: World,
    config: Config,
    make_observers_and_meter: Callable[[Config], tuple[Sequence[Observer], Meter | None]] = lambda config: ((), None),
) -> dict[str, Any]:
    """Collective: train as `train` does, and continue on the remaining ranks when ranks die. Return the run's summary.

    A process that replaces a dead one calls it, too. Spares (processes for which the mesh has no place) wait and return
    the same summary. world: of a process that has created no process group; its launcher records deaths in
    `world.store`. config: with its run folder. make_observers_and_meter: called whenever a new trainer is built.
    """
    count_ranks = functools.partial(_count_usable_ranks, config, world.size)
    membership = Membership(world.store, world.member, world.size, count_ranks, config.comm.timeout_s)
    # Before it joins: the others must not wait for the text.
    corpus = open_corpus(config.data.source, config.data.path, config.data.seq_len)
    recovery = LiveRecovery(membership, corpus, config.fault.memory_every)
    with StopSignalRecorder() as stop:
        has_failed = False
        while (generation := membership.join_next_generation(has_failed)) is not None:
            trainer = None
            try:
                recovery.set_generation(generation)
                rank_world = membership.connect(world)
                if recovery.has_changed_ranks:
                    config = replace(config, fault=replace(config.fault, inject=None))  # injected once
                current = recovery.resume_from_newest_checkpoint(config)
                trainer = Trainer(rank_world, _with_inferred_dp(current), *make_observers_and_meter(current), recovery)
                summary = trainer.run(stop)
            except (CommError, RegroupRequested) as error:
                has_failed = isinstance(error, CommError)
                if has_failed:  # after a regroup another rank may still be in its last operation
                    membership.disconnect()
                recovery.keep_state_for_next_trainer(trainer, error)
                if trainer is not None:
                    trainer.close()
                continue
            except BaseException:
                if trainer is not None:
                    trainer.close()
                raise
            trainer.close()
            membership.end_run(summary)
            return summary
    return membership.summary


def _count_usable_ranks(config: Config, max_ranks: int, live: int) -> int:
    """Return how many of `live` ranks, at most `max_ranks`, the run can use: as many replicas as possible; 0 if none.

    The axes other than dp stay as configured.
    """
    replica = config.mesh.pp * config.mesh.cp * config.mesh.tp
    for size in range(min(live, max_ranks) // replica * replica, 0, -replica):
        try:
            validate(_with_inferred_dp(config), size)
            return size
        except UserError:  # the global batch or the shard group does not divide
            continue
    return 0


def _with_inferred_dp(config: Config) -> Config:
    """Return `config` with the dp axis left open, so that the mesh infers its size from the number of live ranks."""
    return replace(config, mesh=replace(config.mesh, dp=None))


@dataclass(frozen=True)
class ReplicaState:
    """What the ranks know of a live replica of a generation that has ended, where replicas differ. Equal on its ranks.

    replica: its number. num_ranks: the number of its ranks. step: the number of its completed steps. merges_left: the
    number of fragments that a merge after that step has still to merge. global_batch: in samples.
    """

    generation: int
    replica: int
    num_ranks: int
    step: int
    merges_left: int
    global_batch: int


def find_replicas_left(states: Sequence[ReplicaState]) -> list[ReplicaState]:
    """Return the replicas that go on after a failure, in the order of their numbers; [] if there is none.

    states: one of each rank that holds the live tensors of a replica. A replica of which a rank is missing does not go
    on, nor one that has not finished a merge which another one has finished.
    """
    for generation in sorted({one.generation for one in states}, reverse=True):
        held = sorted((one for one in states if one.generation == generation), key=lambda one: one.replica)
        whole = [one for one in dict.fromkeys(held) if held.count(one) == one.num_ranks]
        if whole:
            merges_left = min(one.merges_left for one in whole)
            return [one for one in whole if one.merges_left == merges_left]
    return []


class LiveRecovery(Recovery):
    """The state of live recovery in one process. It outlives failures, and restores each new `Trainer` from memory.

    A generation is the set of live ranks that train together until one dies or a new one arrives; each generation has a
    new trainer. membership: agrees with the other processes on the next generation. corpus: the training text, which
    every trainer of this process uses. memory_every: refresh the copies of the training state in memory every this many
    steps; 0: never.
    """

    connect_timeout_s = CONNECT_TIMEOUT_S

    def __init__(self, membership: Membership, corpus: Corpus, memory_every: int):
        self._membership, self.corpus, self._memory_every = membership, corpus, memory_every
        self._generation: Generation | None = None
        self._is_new = True  # this process has not trained yet
        self._held: list[InMemoryState] = []
        self._live: list[tuple[ReplicaState, InMemoryState]] = []  # of replicas that differ, the newest first
        self._failed: tuple[Trainer, int] | None = None  # and its generation; its live tensors are not yet in `_held`
        self._copies: MemoryCopies | None = None
        self._last_step, self._failures_without_step = 0, 0
        self._failed_at_s: float | None = None
        self._last_failure = -1  # the number of the generation that ended by it
        self._next_look_s = 0.0
        self._rank_of: dict[int, int] = {}  # the last rank of every member
        self._noted_deaths: set[int] = set()

    def set_generation(self, generation: Generation) -> None:
        """Note that this process is a rank of `generation`, the ranks that train until one dies or a new one arrives.

        It connects nothing: `Membership.connect` does.
        """
        self._generation = generation
        self._rank_of |= {member: rank for rank, member in enumerate(generation.members)}

    def keep_state_for_next_trainer(self, trainer: Trainer | None, reason: Exception) -> None:
        """Keep the training state in this rank's memory for the trainer that is built after a failure or regroup.

        trainer: the trainer that ends; None if it was not built completely, in which case the earlier states are kept.
        reason: why the trainer ends. Raises `reason` again if operations have failed several times although nobody has
        died, without a completed step in between.
        """
        if not isinstance(reason, RegroupRequested):
            self._failed_at_s = self._failed_at_s or time.time()
            self._last_failure = self._generation.number
            self._failures_without_step += not self._membership.find_dead_members()
            if self._failures_without_step > _MAX_FAILURES_WITHOUT_STEP:
                raise reason
        if trainer is not None:
            self._is_new, self._last_step = False, trainer.progress.step
            self._failed = trainer, self._generation.number
            self._held = ([] if self._copies is None else self._copies.complete_states) + self._held
        self._copies = None

    def resume_from_newest_checkpoint(self, config: Config) -> Config:
        """Return `config`, set to resume from the run's newest checkpoint if the run has lost or gained ranks before.

        The trainer loads that checkpoint if the ranks hold no complete state in memory. Unchanged without a checkpoint.
        """
        if not self.has_changed_ranks or not folders.complete_checkpoints(Path(config.folder) / run_folder.CHECKPOINTS):
            return config
        how = replace(config.checkpoint, resume=run_folder.AUTO)
        return replace(config, checkpoint=how)

    @property
    def has_changed_ranks(self) -> bool:
        """Whether the run has lost or gained ranks before: this is not its first generation."""
        return self._generation.number > 0

    @property
    def is_regroup_requested(self) -> bool:
        """On rank 0: whether new processes have arrived with which the run can use more ranks. Else False."""
        if self._generation.members[0] != self._membership.member or time.monotonic() < self._next_look_s:
            return False
        self._next_look_s = time.monotonic() + _ARRIVALS_EVERY_S
        return self._membership.is_regroup_useful()

    # -- the state --------------------------------------------------------------------------------------------------

    def restore(self, trainer: Trainer) -> bool:
        """Collective: load the newest training state that the ranks hold in memory into a new trainer.

        Returns False if they hold no complete state; the trainer must then load a checkpoint or start from step 0.
        """
        engine = None if self._failed is None else self._failed[0].engine
        where = (self._failed[1], engine.merger.replica) if engine and engine.merger else None
        known = trainer.all_gather_object(None if engine is None else (where, engine.decision))
        decisions = [one[1] for one in known if one and one[0] == where and one[1] is not None]
        if engine is not None:
            if decisions:
                engine.apply_missed_update(max(decisions, key=lambda one: one.step))
            if engine.completed_steps is not None:
                live = _hold_live_tensors(*self._failed)
                if engine.merger is None:
                    self._held.insert(0, live)
                else:
                    self._live.insert(0, (_describe_replica(*self._failed), live))
            self._failed = None
        gathered = trainer.all_gather_object([state for state, _ in self._live])
        replicas_left = find_replicas_left([state for states in gathered for state in states])

        def make_local_shards(tensors: Mapping[str, SavedTensor]) -> list[TensorShard]:
            create_optimizer_states(trainer.engine, tensors)
            return list(checkpoint_shards(trainer.engine))

        replicas = trainer.config.num_replicas(trainer.mesh)
        loaded = load_from_memory(
            [_with_new_replicas(one, replicas) for one in [*self._select_live_replica(replicas_left), *self._held]],
            make_local_shards,
            [shard.name for shard in checkpoint_shards(trainer.engine)],
            trainer.all_gather_object,
            functools.partial(_exchange_bytes, trainer.control),
            trainer.control.rank,
        )
        if loaded is not None:
            state = loaded.states[0]
            trainer.after_load(state)
            if merger := trainer.engine.merger:
                if merger.replica >= state["replicas"]:
                    merger.forget_progress()  # what it has copied counts once
                num_unmerged = state["num_unmerged"]
                merger.unmerged = merger.due_fragments(state["step"] - 1)[-num_unmerged:] if num_unmerged else []
            trainer.step_time_s = state["step_time_s"]
            trainer.skipped_steps.total, trainer.skipped_steps.consecutive, last = state["skipped_steps"]
            trainer.skipped_steps.last_step = last
            if not any(one["is_reported"] for one in loaded.states):
                trainer.interrupted_step = state["result"]
        self._note_source(trainer, loaded, replicas_left)
        return loaded is not None

    def _select_live_replica(self, replicas_left: list[ReplicaState]) -> list[InMemoryState]:
        """Return this rank's live tensors of `replicas_left`, with the numbers that the replicas have from now on.

        Where replicas have completed different numbers of steps, all of them go on after the smallest.
        """
        step = min((one.step for one in replicas_left), default=0)
        for replica, live in self._live:
            if replica in replicas_left:
                ahead = replica.step - step
                position = live.state["position"] - ahead * replica.global_batch
                state = live.state | {"step": step, "position": position, "replicas": len(replicas_left)}
                shards = list(renumber_replica(live.shards, replica.replica, replicas_left.index(replica)))
                return [InMemoryState(step, self._generation.number, live.origin, state, shards)]
        return []

    def on_start(self, trainer: Trainer) -> None:
        """Collective: copy the training state into the memory of the ranks, with the sharding of the new trainer."""
        mesh, all_gather_object = trainer.mesh, trainer.all_gather_object
        self._copies = MemoryCopies(
            self._generation.number,
            all_gather_object(trainer.world.node_rank),
            [mesh.coords(rank)["dp"] for rank in range(mesh.world_size)],
            all_gather_object,
            functools.partial(_send_receive_bytes, trainer.control),
            trainer.control.rank,
        )
        self._refresh_copies(trainer)
        self._held, self._live = [], []  # all ranks have loaded theirs

    def on_step(self, trainer: Trainer) -> None:
        """Collective: every `memory_every` steps, copy this rank's training state to the host memory of partner ranks.

        The first step after a failure also sends a note with the time since the failure.
        """
        if self._failed_at_s is not None:
            seconds, self._failed_at_s = time.time() - self._failed_at_s, None
            trainer.send_note(f"step {trainer.progress.step} was completed {seconds:.2f} s after the failure")
        self._failures_without_step = 0
        if self._memory_every and trainer.progress.step % self._memory_every == 0:
            self._refresh_copies(trainer)

    def _refresh_copies(self, trainer: Trainer) -> None:
        """Collective: copy the training state into the memory of the ranks, if copies are kept and of use."""
        # A death takes one of several replicas of one rank each, and the others go on. Of replicas of several ranks,
        # the ranks that are left may form none.
        loses_one_replica = trainer.engine.control.size == 1 < trainer.world.size
        if self._memory_every and not loses_one_replica:
            with trainer.groups.meter.span("memory copies"):
                is_reported = trainer.reported_steps == trainer.progress.step  # on rank 0, too: it takes part
                self._copies.refresh(
                    trainer.progress.step, checkpoint_shards(trainer.engine), _describe_progress(trainer, is_reported)
                )

    # -- messages ---------------------------------------------------------------------------------------------------

    def _note_source(self, trainer: Trainer, loaded: LoadedState | None, replicas_left: list[ReplicaState]) -> None:
        """Note who died and arrived, and where the state comes from."""
        if self._last_failure != self._generation.number - 1:  # a spare was absent from the last generation
            self._failed_at_s = None
        here = self._is_new, os.getpid(), self._last_step, self._failed_at_s
        others = trainer.all_gather_object(here)
        if not self.has_changed_ranks:
            return
        last_step = max(step for _, _, step, _ in others)
        self._membership.find_dead_members()
        deaths = [one for one in self._membership.deaths.values() if one.member not in self._noted_deaths]
        self._noted_deaths |= {death.member for death in deaths}
        failed_at = [at for *_, at in others if at is not None] + [death.time_s for death in deaths]
        self._failed_at_s = min(failed_at, default=None)
        # Replicas that differ notice a death only when they meet.
        when = f"by the end of step {last_step + 1}" if trainer.engine.merger else f"in step {last_step + 1}"
        what = [self._describe_death(death, when) for death in deaths]
        what += [f"process {pid} joins" for is_new, pid, *_ in others if is_new]
        size = trainer.world.size
        trainer.start_notes += [
            "; ".join(what) or "an operation between ranks failed",
            f"{size} rank{'s go' if size > 1 else ' goes'} on, {trainer.mesh}, {_describe_source(loaded, last_step)}",
        ]
        if replicas_left:
            trainer.start_notes.append(_describe_replicas(replicas_left, trainer.config.num_replicas(trainer.mesh)))

    def _describe_death(self, death: Death, when: str) -> str:
        """Return a death as text, with the rank that the process had. when: such as "in step 3"."""
        rank = self._rank_of.get(death.member, "?")  # a new process does not know the ranks of before
        return f"rank {rank} (process {death.pid}) died {when}: {death.cause}"


def _describe_replica(trainer: Trainer, generation: int) -> ReplicaState:
    engine, config = trainer.engine, trainer.config
    merger, num_ranks = engine.merger, trainer.world.size // config.num_replicas(trainer.mesh)
    return ReplicaState(
        generation, merger.replica, num_ranks, engine.completed_steps, len(merger.unmerged), config.train.global_batch
    )


def _describe_replicas(left: Sequence[ReplicaState], replicas: int) -> str:
    """Say which replicas go on with their own state, under which numbers, and which begin anew."""
    numbers = [str(one.replica) if one.replica == now else f"{one.replica} (now {now})" for now, one in enumerate(left)]
    text = f"replicas that go on from their own state: {', '.join(numbers)}"
    new = range(len(left), replicas)
    return text + (f"; with the state of replica 0 and weight 0: {', '.join(map(str, new))}" if new else "")


def _describe_source(loaded: LoadedState | None, last_step: int) -> str:
    """Return where the loaded state comes from and how many steps are repeated, as text.

    loaded: None if the ranks held no complete state. last_step: the last completed step.
    """
    if loaded is None:
        return "from the newest checkpoint, or from the start: the ranks left hold no complete state"
    origins = [f"{origin} of {format_ranks(ranks)}" for origin, ranks in loaded.sources.items()]
    lost = last_step - loaded.step
    losses = f"{lost} completed step{'s are' if lost > 1 else ' is'} repeated" if lost > 0 else "no step is lost"
    return f"with the state after step {loaded.step} from the {' and the '.join(origins)}: {losses}"


def _describe_progress(trainer: Trainer, is_reported: bool) -> dict[str, Any]:
    """Return the training state besides the tensors: completed steps, position in the data, loss scale, ...

    The trainer may be one step behind its engine, if that step failed. is_reported: whether rank 0, whose observers
    write the records of the run, has reported the last completed step.
    """
    engine, progress, skipped = trainer.engine, trainer.progress, trainer.skipped_steps
    ahead = engine.completed_steps - progress.step
    return {
        "step": engine.completed_steps,
        "position": progress.consumed_samples + ahead * trainer.config.train.global_batch,
        "loss_scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        "step_time_s": trainer.step_time_s,
        "skipped_steps": (skipped.total, skipped.consecutive, skipped.last_step),
        "replicas": trainer.config.num_replicas(trainer.mesh),
        "num_unmerged": 0 if engine.merger is None else len(engine.merger.unmerged),
        "is_reported": is_reported,
        "result": trainer.interrupted_step if engine.decision is None else engine.decision.result,
    }


def _with_new_replicas(held: InMemoryState, replicas: int) -> InMemoryState:
    """Add the tensors of replicas that the state does not have yet: they begin with those of replica 0."""
    new = range(held.state["replicas"], replicas)
    return replace(held, shards=[*held.shards, *copy_first_replica(held.shards, new)])


def _hold_live_tensors(trainer: Trainer, generation: int) -> InMemoryState:
    """Return the live tensors of a failed trainer, in host memory, as a state. Its engine must not be used any more."""
    shards = [replace(shard, tensor=shard.tensor.detach().cpu()) for shard in checkpoint_shards(trainer.engine)]
    # If rank 0 has died, the step is reported again: its row may be missing, and one that is there is replaced.
    is_reported = trainer.world.rank == 0 and trainer.reported_steps == trainer.engine.completed_steps
    position = _describe_progress(trainer, is_reported)
    return InMemoryState(position["step"], generation, "live tensors", position, shards)


def _exchange_bytes(group: Group, to_send: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Collective: send `to_send[r]` to each rank r; return the tensors received. sizes: their bytes, by rank."""
    device = group.world.control_device
    output = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    lengths = [len(part) for part in to_send]
    comm.all_to_all(output, torch.cat(list(to_send)).to(device), group, list(sizes), lengths)
    return list(output.cpu().split(list(sizes)))


def _send_receive_bytes(group: Group, tensor: Tensor, destination: int, size: int, source: int) -> Tensor:
    """Send a byte tensor to `destination` and receive `size` bytes from `source`; return them. Collective."""
    device = group.world.control_device
    received = torch.empty(size, dtype=torch.uint8, device=device)
    transfers = [P2POp("send", tensor.to(device), destination)] if len(tensor) else []
    transfers += [P2POp("recv", received, source)] if size else []
    comm.batch_send_recv(transfers, group)
    return received.cpu()
