"""Live ranks, seen from the kernel: processes that keep their variables between the cells of a notebook."""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from minidist.errors import RunError, UserError, format_ranks
from minidist.tools.launch import RankServer
from minidist.tools.launch.device import choose_device
from minidist.tools.launch.live_job import LiveJob
from minidist.tools.notebook.rank_session import Cell, serve_requests
from minidist.tools.notebook.request_watcher import RequestWatcher, groups_usable
from minidist.tools.notebook.result import CellResult, adapt_report, format_errors
from minidist.tools.pieces import SymbolReplacements

QUIET_S = 5.0
_FREE_S = 0.8  # for ranks to hear an interrupt
_AGAIN_S = 0.1
_CUT_S = 0.25
_TRIES = 3
_REGROUP_S = 10.0


class LiveRanks:
    """`n` ranks that stay alive between cells; a context manager. Not thread-safe.

    device: as for `RankServer.start`. quiet_s: stop a cell after that long without output or any operation that begins
    or ends on the ranks that still run it.
    memory_gib: memory limit of each rank's variables, on CPU; a share of the free memory if None.
    server: a running rank server to use; a new one if None.
    pieces: the symbols replaced in this process; sources: (source, beside) by name, applied to the ranks too.
    Raises UserError when `n` is not a number of ranks or the device does not exist.
    """

    def __init__(
        self,
        n: int,
        *,
        device: str = "cpu",
        quiet_s: float = QUIET_S,
        memory_gib: float | None = None,
        server: RankServer | None = None,
        pieces: SymbolReplacements | None = None,
        sources: dict[str, tuple[str, tuple[str, ...]]] | None = None,
    ):
        self.n, self.quiet_s, self.last = n, quiet_s, None
        self.device = device if device == "cpu" or choose_device(device, 0, n).type != "cpu" else "cpu"
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._own = server is None
        self._pieces = pieces if pieces is not None else SymbolReplacements()
        self._sources = sources if sources is not None else {}
        self._cells = self._generation = 0
        self._server = server or RankServer()
        self._job: LiveJob | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LiveRanks":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._job.pids

    def close(self) -> None:
        """End the ranks."""
        if self._job is not None:
            self._job.kill()
        if self._own:
            self._server.close()

    def run(
        self,
        source: str,
        *,
        name: str | int | None = None,
        first_line: int = 1,
        quiet_s: float | None = None,
        timeout_s: float | None = None,
        show: Callable[[str], None] | None = None,
    ) -> CellResult:
        """Execute `source` on every rank and return the result. Never raises because of what the cell does.

        name: the cell's number or name in messages, without spaces; first_line: the number of its first line there.
        quiet_s: overrides the one of this object; timeout_s: limit for the cell, None for none.
        show: called from time to time with what the ranks have printed so far.
        """
        self._cells += 1
        cell = Cell(f"cell {self._cells if name is None else name}", "\n" * (first_line - 1) + source)
        with _interrupts() as interrupts:
            notes = self._replaced()
            watch = RequestWatcher(self._job, self.quiet_s if quiet_s is None else quiet_s, timeout_s, show)
            kind, why = watch.run_request(("run", cell), interrupts)
            if kind not in ("done", "died"):
                self._free()
            # Numbers tell earlier cells apart; that of this cell would differ in every run.
            why = re.sub(rf" of {re.escape(cell.name)}\b", " of the cell", why)
            self.last = self._concluded(kind, why, notes)
        return self.last

    def get(self, name: str) -> list[Any]:
        """Return the value of a variable, or any expression, of every rank. Raises UserError when a rank has none."""
        self._replaced()
        kind, why = RequestWatcher(self._job, self.quiet_s, None).run_request(("get", name), [])
        answers = self._job.answers
        faults = {rank: answer.fault for rank, answer in answers.items() if answer.fault}
        if kind != "done" or faults:
            raise UserError("\n".join([why] if why else format_errors(faults)))
        return [answers[rank].value for rank in range(self.n)]

    def piece(self, name: str, source: str, beside: Collection[str] = ()) -> None:
        """Replace the symbol `name` by this source, in this process and on every rank, also those started later.

        beside, and what it raises: as for `SymbolReplacements.replace`; after an error nothing has changed.
        """
        self._pieces.replace(name, source, f"piece {name}", beside=beside)
        self._sources[name] = source, tuple(beside)
        self._replaced()
        self._give(name)

    def reset(self, name: str | None = None) -> list[str]:
        """Restore a replaced symbol, or all of them without a name, everywhere. Returns the restored names."""
        names = self._pieces.reset(name)
        for each in names:
            self._sources.pop(each, None)
        self._replaced()
        self._tell(("reset", name))
        return names

    # -- implementation -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for _ in range(_TRIES):  # a rank server that is just dying may take one more job
            arguments = (self._memory_bytes,)
            self._job = self._server.start(
                serve_requests, self.n, arguments, backend=None, device=self.device, live=True
            )
            if self._regroup():
                for name in self._sources:
                    self._give(name)
                return
            told = self._job.describe_deaths() if self._job.dead_ranks else "they do not answer"
            self._job.kill()
        raise RunError(f"{self.n} ranks could not be started: {told}")

    def _give(self, name: str) -> None:
        if not self._tell(("piece", name, f"piece {name}", *self._sources[name])):
            faults = {n: answer.fault for n, answer in self._job.answers.items() if answer.fault}
            raise UserError("\n".join([f"{name} could not be replaced on the ranks", *format_errors(faults)]))

    def _restart(self) -> None:
        self._job.kill()
        self._start()

    def _tell(self, message: tuple) -> bool:
        """Send a request that cannot take long; return whether all ranks carried it out."""
        kind, _ = RequestWatcher(self._job, _REGROUP_S, _REGROUP_S).run_request(message, [])
        return kind == "done" and all(answer.kind == "done" for answer in self._job.answers.values())

    def _regroup(self) -> bool:
        self._generation += 1
        return self._tell(("regroup", self._generation))

    def _replaced(self) -> list[str]:
        """Restart ranks that died since the last cell; return the line that says so."""
        self._job.poll()
        if not self._job.dead_ranks:
            return []
        why = adapt_report(self._job.describe_deaths()).splitlines()[0]
        self._restart()
        return [f"{why}. {self._gone()}"]

    def _gone(self) -> str:
        return f"All ranks were restarted: the variables of {format_ranks(range(self.n))} are gone."

    def _free(self) -> None:
        """Interrupt the ranks that still run the cell."""
        job, start_s = self._job, time.monotonic()
        while not job.all_answered and not job.dead_ranks and time.monotonic() - start_s < _FREE_S:
            job.interrupt(close_connections=time.monotonic() - start_s > _CUT_S)
            again_s = time.monotonic() + _AGAIN_S
            while not job.all_answered and time.monotonic() < again_s:
                job.poll(again_s - time.monotonic())

    def _concluded(self, kind: str, why: str, notes: list[str]) -> CellResult:
        """Collect the result of a cell, then restore working ranks for the next one."""
        job = self._job
        job.drain_output()
        answers = dict(job.answers)
        outputs = [rank.output for rank in job.ranks]
        shown = [answers[n].shown if n in answers else "" for n in range(self.n)]
        records = [answers[n].records if n in answers else () for n in range(self.n)]
        faults = {n: answer.fault for n, answer in answers.items() if answer.fault}
        # A broken connection is what the others see of a rank that died or left.
        own = {n: fault for n, fault in faults.items() if not fault.network}
        told = own if own or kind == "died" else faults
        errors = [*format_errors(told), *([why] if why else [])]
        if kind == "done" and (left := [n for n, answer in answers.items() if answer.kind == "stopped"]):
            kind, errors = "stopped", [*errors, f"{format_ranks(left)} raised KeyboardInterrupt"]
        alone = not all(answer.grouped for answer in answers.values())
        ended = kind if kind != "deadlock" or not own else "error"  # the others wait for those that raised
        ended = "error" if kind == "done" and faults else ended
        if job.dead_ranks:
            self._restart()
            notes = [*notes, self._gone()]
        elif not job.all_answered:
            stuck = [n for n in range(self.n) if n not in answers]
            self._restart()
            notes = [*notes, f"{format_ranks(stuck)} could not be stopped. {self._gone()}"]
        elif kind != "done" or alone or len(faults) > len(own) or (faults and not groups_usable(job.last_snapshots())):
            if self._regroup():
                notes = [*notes, "The ranks keep their variables and have a new process group."]
            else:
                self._restart()
                notes = [*notes, f"The ranks could not be connected again. {self._gone()}"]
        return CellResult(ended, outputs, shown, errors, notes, records)


@contextlib.contextmanager
def _interrupts():
    """Context in which Ctrl-C appends to the returned list instead of raising KeyboardInterrupt."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
