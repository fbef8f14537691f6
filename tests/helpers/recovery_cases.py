"""Runs with live recovery in which ranks kill themselves at chosen points, for tests."""

import contextlib
import hashlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from minidist.comm import CommError, all_reduce, recv
from minidist.config import FaultConfig
from minidist.tools.console.metrics_file import MetricsFile
from minidist.tools.launch.job import Replacement
from minidist.tools.launch.run import make_observers_and_meter
from minidist.tools.recovery import live_recovery as recovery_module
from minidist.train import engine as engine_module
from minidist.train.observer import Observer
from tests.helpers.small_run import DEADLINE_S, small_config, write_text

FP64 = {"precision__policy": "fp64"}


@dataclass(frozen=True)
class Kill:
    """A process's end. member: its number. step: from 1. phase: forward, reduce, agreed, merge, second fragment,
    report, row or restore.

    row: on rank 0, before it writes the step's row, when member 1 is in the next step. second fragment: between two
    fragments of a merge, when all other replicas have merged the first one.
    """

    member: int
    step: int
    phase: str = "reduce"


@dataclass(frozen=True)
class Script:
    """What happens in a run. kills: see `Kill`. lost_replies: (member, step): this process does not get the agreement's
    result, as if the connection broke. wait_at: steps before which rank 0 waits until a new member has arrived.
    are_replacements_late: whether new processes join only when the others have gone on. are_survivors_patient: whether
    after a death the others wait for a new process before they go on. deadlock_at: before this step
    ranks 0 and 1 wait for a message from each other.
    """

    kills: tuple[Kill, ...] = ()
    lost_replies: tuple[tuple[int, int], ...] = ()
    wait_at: tuple[int, ...] = ()
    are_replacements_late: bool = False
    are_survivors_patient: bool = False
    deadlock_at: int | None = None


class Actor(Observer):
    """Does on this rank what the script says, and reports digests of the parameters at the end."""

    def __init__(self, world, script: Script):
        self._store, self._member, self._script, self._full_size = world.store, world.member, script, world.size

    def _is_due(self, trainer, phase: str) -> bool:
        return Kill(self._member, trainer.progress.step + 1, phase) in self._script.kills

    def before_step(self, trainer):
        step = trainer.progress.step + 1
        if Kill(0, step - 1, "row") in self._script.kills:
            self._store.set(f"begun/{step}/{self._member}", "")
        if step in self._script.wait_at and trainer.world.rank == 0 and trainer.world.size < self._full_size:
            number = trainer.recovery._generation.number
            wait_for_key(self._store, f"arrivals/{number + 1}/0")
        if step == self._script.deadlock_at and trainer.world.rank < 2:
            recv(torch.zeros(1), 1 - trainer.world.rank, trainer.control)

    @contextlib.contextmanager
    def step_context(self, trainer):
        if self._is_due(trainer, "forward"):
            _die()
        if self._is_due(trainer, "merge"):
            trainer.engine.merger.merge_if_due = _die
        if any(
            (kill.step, kill.phase) == (trainer.progress.step + 1, "second fragment") for kill in self._script.kills
        ):
            self._record_merge(trainer)
        if self._is_due(trainer, "reduce"):
            trainer.engine.reducer.finish_reductions = _die
        before = engine_module.agree_on_step
        engine_module.agree_on_step = self._replaced_agreement(trainer, before)
        try:
            yield
        finally:
            engine_module.agree_on_step = before

    def _record_merge(self, trainer):
        """Store what this replica brings to the step's merge, `member-N.pt` beside the run's folder; die in it if due.

        As if the replicas had trained on different numbers of tokens, those of member N are multiplied by N + 1.
        """
        merger, is_last = trainer.engine.merger, self._is_due(trainer, "second fragment")
        merge_if_due, merge_fragment = merger.merge_if_due, merger._merge_fragment

        def record_and_merge(*arguments):
            merger.tokens *= self._member + 1
            masters = {name: master.detach().clone() for name, master in trainer.engine.reducer.masters.items()}
            file = Path(trainer.config.folder).parent / f"member-{self._member}.pt"
            torch.save({"tokens": merger.tokens.tolist(), "masters": masters}, file)
            return merge_if_due(*arguments)

        def merge_or_die(fragment, *arguments):
            if is_last and fragment > 0:
                for member in set(range(self._full_size)) - {self._member}:
                    wait_for_key(self._store, f"merged/{member}")
                _die()
            merge_fragment(fragment, *arguments)
            self._store.set(f"merged/{self._member}", "")

        merger.merge_if_due, merger._merge_fragment = record_and_merge, merge_or_die

    def _replaced_agreement(self, trainer, agree):
        def agree_on_step(loss, squared_norm, stop_requested, extra_values, tokens, scaler, group):
            if (self._member, trainer.progress.step + 1) in self._script.lost_replies:
                vector = torch.tensor([loss, squared_norm, float(stop_requested), *extra_values], dtype=torch.float64)
                all_reduce(vector, group)
                raise CommError("the result of the agreement did not arrive")
            result = agree(loss, squared_norm, stop_requested, extra_values, tokens, scaler, group)
            if self._is_due(trainer, "agreed"):
                _die()
            return result

        return agree_on_step

    def on_step(self, trainer, result):
        if Kill(self._member, trainer.progress.step, "report") in self._script.kills:
            _die()

    def on_end(self, trainer, summary):
        if trainer.config.zero.stage == 3:
            return  # its parameters are gathered only while they are needed
        state = b"".join(p.detach().numpy().tobytes() for p in trainer.engine.parameters.values())
        summary["digest"] = hashlib.sha256(state).hexdigest()
        summary["ranks"], summary["member"] = trainer.world.size, self._member


def wait_for_key(store, key: str) -> None:
    """Wait until a key is in the store; other threads of this process can use the store meanwhile."""
    while not store.check([key]):
        os.sched_yield()


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def train_script(world, config, script: Script) -> dict:
    """Train on this process with live recovery, as the script says; returns the summary."""
    torch.set_num_threads(1)
    recovery_module._ARRIVALS_EVERY_S = 0.0  # or a step that follows `wait_at` at once would not look
    if script.are_replacements_late and world.member >= world.size:
        wait_for_key(world.store, "members/1")
    restore = recovery_module.LiveRecovery.restore

    def restore_or_die(self, trainer):
        due = [k for k in script.kills if k.phase == "restore" and k.member == world.member]
        if due and self.has_changed_ranks:
            _die()
        return restore(self, trainer)

    recovery_module.LiveRecovery.restore = restore_or_die
    write_row = MetricsFile.write_row

    def write_row_or_die(self, row):
        if Kill(world.member, row.get("step"), "row") in script.kills:
            wait_for_key(world.store, f"begun/{row['step'] + 1}/1")
            _die()
        write_row(self, row)

    MetricsFile.write_row = write_row_or_die
    join = recovery_module.Membership.join_next_generation

    def join_with_new_process(self, has_failed):
        if script.are_survivors_patient and has_failed:
            wait_for_key(world.store, "arrivals/1/0")
        return join(self, has_failed)

    recovery_module.Membership.join_next_generation = join_with_new_process

    def make_all(config):
        observers, meter = make_observers_and_meter(config)
        return [Actor(world, script), *observers], meter

    return recovery_module.train_with_recovery(world, config, make_all)


def recovery_config(folder: Path, **changes):
    """The small run with live recovery: 8 steps, no checkpoint before the last."""
    fault = FaultConfig(live_recovery=True, memory_every=changes.pop("memory_every", 1))
    text = write_text(folder.parent)
    return small_config(folder, text, **{"train__steps": 8, "checkpoint__every": 0, "fault": fault} | changes)


def run_script(server, config, script: Script, ranks: int = 4, backend: str = "gloo", max_restarts: int = 3):
    """Run the script on ranks that are replaced; returns the job's result."""
    mesh = config.mesh
    replacement = Replacement(max_restarts, mesh.pp * mesh.cp * mesh.tp)
    return server.run(
        train_script, ranks, (config, script), backend=backend, replacement=replacement, deadline_s=DEADLINE_S
    )
