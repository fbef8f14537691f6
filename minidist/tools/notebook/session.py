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
from minidist.tools.notebook.request_watcher import RequestWatcher, all_operations_matched
from minidist.tools.notebook.result import CellResult, adapt_report_to_notebook, format_errors
from minidist.tools.pieces import SymbolReplacements

QUIET_S = 5.0
_INTERRUPT_S = 0.8  # for interrupts to take effect
_INTERRUPT_PERIOD_S = 0.1
_CLOSE_CONNECTIONS_S = 0.25
_MAX_STARTS = 3
_REGROUP_S = 10.0


class LiveRanks:
    """`n` rank processes that keep their variables between the cells of a notebook; a context manager. Not thread-safe.

    device: "cpu", or another device name as for `RankServer.start`. quiet_s: a cell is stopped if, for that many
    seconds, no rank that still runs it prints, or begins or ends a communication operation.
    memory_gib: memory limit in GiB of each rank's variables, on CPU; an equal part of the free memory if None.
    server: a running rank server, which starts the ranks; a new one if None.
    pieces: the symbols replaced in this process. sources: (source, also_replaced) of each replaced symbol, by symbol;
    the ranks replace these symbols, too.
    last: the `CellResult` of the last cell.
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
        self._owns_server = server is None
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
        """The process id of each rank, in rank order."""
        return self._job.pids

    def close(self) -> None:
        """Kill the ranks, and close the rank server if this object started it."""
        if self._job is not None:
            self._job.kill()
        if self._owns_server:
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
        """Execute the source of a cell on every rank, wait for all ranks, and return the outcome.

        Errors of the cell are part of the result, not raised. Afterwards the ranks can run the next cell: if necessary
        they are interrupted, get a new process group, or are restarted without their variables. name: the cell's number
        or name in messages, without spaces; a running number if None. first_line: the number of its first line in
        messages. quiet_s: overrides this object's `quiet_s`. timeout_s: time limit in seconds for the cell; None for no
        limit. show: called about twice a second with the latest output of the ranks as text.
        """
        self._cells += 1
        cell = Cell(f"cell {self._cells if name is None else name}", "\n" * (first_line - 1) + source)
        with _collect_interrupts() as interrupts:
            notes = self._restart_dead_ranks()
            watch = RequestWatcher(self._job, self.quiet_s if quiet_s is None else quiet_s, timeout_s, show)
            kind, why = watch.run_request(("run_cell", cell), interrupts)
            if kind not in ("done", "died"):
                self._interrupt_ranks()
            # Earlier cells are named by number; the number of this cell would differ in every run.
            why = re.sub(rf" of {re.escape(cell.name)}\b", " of the cell", why)
            self.last = self._make_result(kind, why, notes)
        return self.last

    def get(self, expression: str) -> list[Any]:
        """Evaluate an expression, such as the name of a variable, on every rank; return its values in rank order.

        Tensors are copied to the CPU. Raises UserError if the evaluation raises on a rank or does not end.
        """
        self._restart_dead_ranks()
        kind, why = RequestWatcher(self._job, self.quiet_s, None).run_request(("evaluate", expression), [])
        answers = self._job.answers
        faults = {rank: answer.fault for rank, answer in answers.items() if answer.fault}
        if kind != "done" or faults:
            raise UserError("\n".join([why] if why else format_errors(faults)))
        return [answers[rank].value for rank in range(self.n)]

    def replace_symbol(self, symbol: str, source: str, also_replaced: Collection[str] = ()) -> None:
        """Replace a function or class of the package by `source`, in this process and on every rank.

        Ranks replace the symbol again after a restart. symbol: such as "module:function". also_replaced: names of other
        symbols that `source` may define too. Raises UserError if the symbol cannot be replaced, and any exception from
        compiling or running `source`; then this process keeps the old definition.
        """
        self._pieces.replace_symbol(symbol, source, f"piece {symbol}", also_replaced=also_replaced)
        self._sources[symbol] = source, tuple(also_replaced)
        self._restart_dead_ranks()
        self._replace_on_ranks(symbol)

    def restore_symbols(self, symbol: str | None = None) -> list[str]:
        """Restore the original of a replaced symbol, or of all if `symbol` is None, here and on every rank.

        Returns the names of the restored symbols.
        """
        names = self._pieces.restore_symbols(symbol)
        for each in names:
            self._sources.pop(each, None)
        self._restart_dead_ranks()
        self._request(("restore_symbols", symbol))
        return names

    # -- implementation -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the ranks, create their process group and replace the replaced symbols on them."""
        for _ in range(_MAX_STARTS):  # a rank server that is ending may accept one more job
            arguments = (self._memory_bytes,)
            self._job = self._server.start(
                serve_requests, self.n, arguments, backend=None, device=self.device, live=True
            )
            if self._recreate_group():
                for name in self._sources:
                    self._replace_on_ranks(name)
                return
            reported = self._job.describe_deaths() if self._job.dead_ranks else "they do not answer"
            self._job.kill()
        raise RunError(f"{self.n} ranks could not be started: {reported}")

    def _replace_on_ranks(self, name: str) -> None:
        """Replace a symbol on every rank. Raises UserError if a rank fails to."""
        if not self._request(("replace_symbol", name, f"piece {name}", *self._sources[name])):
            faults = {n: answer.fault for n, answer in self._job.answers.items() if answer.fault}
            raise UserError("\n".join([f"{name} could not be replaced on the ranks", *format_errors(faults)]))

    def _restart(self) -> None:
        """Kill all ranks and start new ones, without their variables."""
        self._job.kill()
        self._start()

    def _request(self, message: tuple) -> bool:
        """Send a request that cannot take long; return whether all ranks carried it out."""
        kind, _ = RequestWatcher(self._job, _REGROUP_S, _REGROUP_S).run_request(message, [])
        return kind == "done" and all(answer.kind == "done" for answer in self._job.answers.values())

    def _recreate_group(self) -> bool:
        """Recreate the default process group on all ranks; return whether all succeeded."""
        self._generation += 1
        return self._request(("recreate_process_group", self._generation))

    def _restart_dead_ranks(self) -> list[str]:
        """Restart ranks that died since the last cell; return the line that says so."""
        self._job.poll()
        if not self._job.dead_ranks:
            return []
        why = adapt_report_to_notebook(self._job.describe_deaths()).splitlines()[0]
        self._restart()
        return [f"{why}. {self._lost_variables_note()}"]

    def _lost_variables_note(self) -> str:
        """Return the note that says that all ranks were restarted."""
        return f"All ranks were restarted: the variables of {format_ranks(range(self.n))} are gone."

    def _interrupt_ranks(self) -> None:
        """Interrupt the ranks that still run the cell."""
        job, start_s = self._job, time.monotonic()
        while not job.all_answered and not job.dead_ranks and time.monotonic() - start_s < _INTERRUPT_S:
            job.interrupt_ranks(close_connections=time.monotonic() - start_s > _CLOSE_CONNECTIONS_S)
            again_s = time.monotonic() + _INTERRUPT_PERIOD_S
            while not job.all_answered and time.monotonic() < again_s:
                job.poll(again_s - time.monotonic())

    def _make_result(self, kind: str, why: str, notes: list[str]) -> CellResult:
        """Collect the result of a cell, then restore working ranks for the next one."""
        job = self._job
        job.drain_output()
        answers = dict(job.answers)
        outputs = [rank.output for rank in job.ranks]
        shown = [answers[n].shown if n in answers else "" for n in range(self.n)]
        records = [answers[n].records if n in answers else () for n in range(self.n)]
        faults = {n: answer.fault for n, answer in answers.items() if answer.fault}
        # Errors of broken connections only follow from a rank that died or raised.
        own = {n: fault for n, fault in faults.items() if not fault.is_connection_error}
        reported = own if own or kind == "died" else faults
        errors = [*format_errors(reported), *([why] if why else [])]
        if kind == "done" and (left := [n for n, answer in answers.items() if answer.kind == "stopped"]):
            kind, errors = "stopped", [*errors, f"{format_ranks(left)} raised KeyboardInterrupt"]
        is_group_missing = not all(answer.has_process_group for answer in answers.values())
        result_kind = kind if kind != "deadlock" or not own else "error"  # the others wait for those that raised
        result_kind = "error" if kind == "done" and faults else result_kind
        if job.dead_ranks:
            self._restart()
            notes = [*notes, self._lost_variables_note()]
        elif not job.all_answered:
            stuck = [n for n in range(self.n) if n not in answers]
            self._restart()
            notes = [*notes, f"{format_ranks(stuck)} could not be stopped. {self._lost_variables_note()}"]
        elif (
            kind != "done"
            or is_group_missing
            or len(faults) > len(own)
            or (faults and not all_operations_matched(job.last_snapshots()))
        ):
            if self._recreate_group():
                notes = [*notes, "The ranks keep their variables and have a new process group."]
            else:
                self._restart()
                notes = [*notes, f"The ranks could not be connected again. {self._lost_variables_note()}"]
        return CellResult(result_kind, outputs, shown, errors, notes, records)


@contextlib.contextmanager
def _collect_interrupts():
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
