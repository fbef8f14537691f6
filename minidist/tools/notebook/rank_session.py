"""The rank's side of live ranks: run cells in one persistent namespace and answer with their outcome."""

import ast
import contextlib
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import types
from typing import Any, NamedTuple

import torch

from minidist.comm import Record
from minidist.comm.world import World
from minidist.tools.breakpoints import format_variables
from minidist.tools.launch.memory_limit import MemoryLimit
from minidist.tools.launch.rank_worker import RankWorker
from minidist.tools.pieces import SymbolReplacements

_MAX_RECORDS = 20_000  # of one cell, sent to the kernel
_MAX_KEPT = 200_000
_MAX_SHOWN = 20_000  # characters of a value
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Cell(NamedTuple):
    """A notebook cell to run on a rank. name: its file name in tracebacks and in the rank status, such as "cell 7"."""

    name: str
    source: str


class CellError(NamedTuple):
    """An exception that a cell raised on a rank.

    kind: name of the exception's class. message: the exception's text. line: number of the cell's line that raised, 0
    if unknown. text: the source of that line. inside: `file:line in f` where it was raised, "" if in the cell itself.
    is_connection_error: whether a broken connection caused it, for example because another rank has died.
    """

    kind: str
    message: str
    line: int
    text: str
    inside: str
    is_connection_error: bool


class Answer(NamedTuple):
    """A rank's answer to one request of the notebook, such as to run a cell.

    kind: "done", "error" or "stopped" (by Ctrl-C). shown: repr of the cell's last expression, "" for none. fault: the
    error if the kind is "error". value: the value of the expression, if the request was to evaluate one. records: the
    traffic meter's records of the communication operations in this request. has_process_group: whether the rank has a
    default process group after the request.
    """

    kind: str
    shown: str = ""
    fault: CellError | None = None
    value: Any = None
    records: tuple[Record, ...] = ()
    has_process_group: bool = True


def serve_requests(world: World, rank_worker: RankWorker, memory_bytes: int | None = None) -> None:
    """Run the notebook's requests on a rank and send back the answers, until the notebook closes the connection.

    The rank's process runs this function. A request is a number and a tuple: the name of a `RankSession` method and its
    arguments. memory_bytes: how much memory cells may add to the rank's present memory; this rank's part of the free
    memory if None.
    """
    session = RankSession(world, rank_worker, memory_bytes)
    while True:
        number, (name, *arguments) = rank_worker.receive_request()
        answer = session._execute_request(getattr(session, name), *arguments)
        try:
            rank_worker.send_answer((number, answer))
        except (pickle.PickleError, TypeError, AttributeError, ValueError) as error:  # it cannot be pickled
            rank_worker.send_answer(
                (number, Answer("error", fault=CellError(type(error).__name__, str(error), 0, "", "", False)))
            )


class RankSession:
    """Runs the requests of a notebook in a rank's process; keeps the cells' variables and the replaced symbols.

    world: this rank's world. rank_worker: receives requests and has this rank's traffic meter. memory_bytes: as for
    `serve_requests`. names: the namespace in which cells run.
    """

    def __init__(self, world: World, rank_worker: RankWorker, memory_bytes: int | None):
        self._world, self._rank_worker, self._pieces = world, rank_worker, SymbolReplacements()
        self._is_busy = False
        self._memory = MemoryLimit(world.local_size, memory_bytes) if world.device.type == "cpu" else None
        self._wake_receiver, wake_sender = socket.socketpair()
        wake_sender.setblocking(False)
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        self._wake_sender = wake_sender
        signal.signal(signal.SIGUSR2, lambda *_: None)  # received through the wake-up socket
        threading.Thread(target=self._receive_signals, name="interrupts", daemon=True).start()
        # Pickle finds the classes that cells define in the module they name, which is this one.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.names = vars(module)
        self.names.update(
            torch=torch,
            dist=torch.distributed,
            world=world,
            rank=world.rank,
            world_size=world.size,
            meter=rank_worker.meter,
        )
        self._own_names = {*self.names, "comm"}
        sys.breakpointhook = self._print_variables

    def _print_variables(self, *_, **__) -> None:
        """Print line and variables where the cell called `breakpoint()`: a rank has no keyboard, so it goes on."""
        frame = sys._getframe(1)
        file, line = frame.f_code.co_filename, frame.f_lineno
        place = f"line {line} of {'the cell' if _is_cell_name(file) else os.path.basename(file)}"
        if frame.f_code.co_name != "<module>":
            place += f", in {frame.f_code.co_name}"
        shown = format_variables(frame, self._own_names if frame.f_locals is self.names else ())
        print("\n  ".join([f"breakpoint() at {place} (a rank prints its variables and goes on):", *shown]))

    def _interrupt(self, *_) -> None:
        """Raise KeyboardInterrupt if a request is running; called on SIGINT."""
        if self._is_busy:
            raise KeyboardInterrupt

    def _receive_signals(self) -> None:
        """Receive signals in a thread of its own, for a rank blocked in torch; close its connections on SIGUSR2."""
        while data := self._wake_receiver.recv(64):
            if signal.SIGUSR2 in data and self._is_busy:
                self._rank_worker.close_connections()

    def _execute_request(self, method, *arguments) -> Answer:
        """Call `method` of this session and return its answer, whose kind reports an exception or Ctrl-C."""
        del self._rank_worker.meter.records[:-_MAX_KEPT]
        status, first = self._world.status, len(self._rank_worker.meter.records)
        status.on_resume()
        signal.signal(signal.SIGINT, self._interrupt)  # anew for every cell, which may set a handler of its own
        try:
            try:
                self._is_busy = method in (
                    self.run_cell,
                    self.evaluate,
                )  # a late interrupt must not stop a recreation of the group
                with self._memory.apply() if self._is_busy and self._memory else contextlib.nullcontext():
                    answer = method(*arguments)
            finally:
                self._is_busy = False
                _flush_streams()
        except KeyboardInterrupt:
            answer = Answer("stopped")
        except BaseException as error:
            answer = Answer("error", fault=self._explain_out_of_memory(_describe_error(error)))
        status.record_end("returned" if answer.kind == "done" else "failed")
        records = tuple(self._rank_worker.meter.records[first:][-_MAX_RECORDS:])
        return answer._replace(records=records, has_process_group=torch.distributed.is_initialized())

    def _explain_out_of_memory(self, fault: CellError) -> CellError:
        """Replace the message of an out-of-memory error by one that says what to do."""
        if self._memory is None or not (fault.kind == "MemoryError" or "can't allocate memory" in fault.message):
            return fault
        more = f"more than the {self._memory.extra_bytes / 2**30:.1f} GiB that this rank may take on this machine"
        more += "\nits variables are kept: `del` the large ones, or ask for new ranks with %ranks"
        return fault._replace(kind="MemoryError", message=more)

    def recreate_process_group(self, generation: int) -> Answer:
        """Collective: recreate torch's default process group; bind it to the variable `comm` of the cells.

        generation: a number that is new in each call and equal on all ranks.
        """
        self.names["comm"] = self._rank_worker.recreate_process_group(generation)
        return Answer("done")

    def run_cell(self, cell: Cell) -> Answer:
        """Execute a notebook cell on this rank; answer with the repr of its last expression.

        The answer has no repr if the cell ends in a semicolon.
        """
        linecache.cache[cell.name] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.name)
        tree = ast.parse(cell.source, cell.name)
        quiet = cell.source.rstrip().endswith(";")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet else None
        exec(compile(tree, cell.name, "exec", dont_inherit=True), self.names)
        if last is None:
            return Answer("done")
        value = eval(compile(ast.Expression(last.value), cell.name, "eval", dont_inherit=True), self.names)
        if value is None:
            return Answer("done")
        self.names["_"] = value
        shown = repr(value)
        return Answer("done", shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + " ...")

    def evaluate(self, expression: str) -> Answer:
        """Evaluate an expression with the cells' variables; answer with its value. A tensor is copied to the CPU."""
        value = eval(expression, self.names)
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        return Answer("done", value=value)

    def replace_symbol(self, symbol: str, filename: str, source: str, also_replaced: tuple[str, ...]) -> Answer:
        """Replace a symbol of the package on this rank, as `SymbolReplacements.replace_symbol` does."""
        self._pieces.replace_symbol(symbol, source, filename, also_replaced=also_replaced)
        return Answer("done")

    def restore_symbols(self, symbol: str | None) -> Answer:
        """Restore the original of a replaced symbol on this rank, or of all replaced symbols if `symbol` is None."""
        self._pieces.restore_symbols(symbol)
        return Answer("done")


def _flush_streams() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _describe_error(error: BaseException) -> CellError:
    """Describe an exception, with the line of the cell that raised it."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    own = [(code, line) for code, line in frames if _is_cell_name(code.co_filename)]
    name, line = (own[-1][0].co_filename, own[-1][1]) if own else ("", 0)
    if isinstance(error, SyntaxError) and _is_cell_name(error.filename or ""):
        name, line = error.filename, error.lineno or 0
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    outside = [(code, at) for code, at in frames if not code.co_filename.startswith(_TORCH)]
    code, at = outside[-1] if outside else (None, 0)
    inside = ""
    if own and code is not None and not _is_cell_name(code.co_filename) and not code.co_filename.startswith("<"):
        inside = f"{'/'.join(code.co_filename.split(os.sep)[-2:])}:{at} in {code.co_name}"
    is_connection_error = isinstance(error, torch.distributed.DistError) or type(error).__name__ == "CommError"
    is_connection_error = is_connection_error or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return CellError(
        type(error).__name__, message, line, linecache.getline(name, line).strip(), inside, is_connection_error
    )


def _is_cell_name(filename: str) -> bool:
    """Return whether a file name in a traceback stands for a cell."""
    return filename.startswith("cell ")
