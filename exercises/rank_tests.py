"""The rank's side of a check: load the learner's file, run the tests in order, store the first finding."""

import contextlib
import faulthandler
import inspect
import json
import linecache
import marshal
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from exercises.guard import ForbiddenAction, Guard
from exercises.interpreters import load_answer_file
from exercises.testing import Answer, Finding, ProcessFailed, RunningCall, Wrong
from minidist.tools.breakpoints import format_variables

_MODULE = "answer"


@dataclass(frozen=True)
class Request:
    """The tests to run on a rank, and what they need.

    folder: of the findings, and the working directory of the learner's code. memory_bytes: how much memory the answer
    may allocate. token: what a rank returns if all tests pass, which an answer cannot know. test_code: of the test
    file, compiled once for all ranks, by `marshal`. program: whether the answer makes its own process group. offered:
    further arguments of tests, by name. condition: the only kind of `exercises.conditions` to check; None for all.
    """

    answer: str
    test_file: str
    test_code: bytes
    tests: tuple[str, ...]
    symbols: tuple[str, ...]
    pieces: tuple[str, ...]
    guards: tuple[str, ...]
    secret: tuple[str, ...]
    folder: str
    memory_bytes: int
    token: str
    program: bool = False
    offered: Mapping[str, Any] = field(default_factory=dict)
    condition: str | None = None


class BreakpointReached(BaseException):
    """Raised by `breakpoint()` in the learner's code. Not an Exception, so that `except Exception` does not hide it."""


class FindingStored(Exception):
    """Raised after this rank has stored a finding; it ends the job."""


def run_tests(world, request: Request) -> str:
    """Run the tests on this rank; return the request's token.

    Raises FindingStored after storing the first finding in the request's folder.
    """
    # With these comes torch, which the parent of the ranks can do without.
    from exercises.network import Network, Torchrun
    from exercises.shared_code import SHARED_CODE, describe_change
    from exercises.side_effects import SideEffects

    os.chdir(request.folder)
    sys.dont_write_bytecode = True
    faulthandler.enable(file=2, all_threads=False)
    sys.breakpointhook = _stop_at_breakpoint
    note = RunningCall(f"{request.folder}/note-{world.rank}")
    guard = Guard(request.answer, request.test_file, SHARED_CODE.changed_function)
    module = _load_tests(request)
    tests = {name: getattr(module, name) for name in request.tests}
    parameters = {name: set(inspect.signature(test).parameters) for name, test in tests.items()}
    deferred = _deferred_functions(request.pieces)  # before the guard replaces their code
    network = None if request.program else Network(world, request.condition)
    may_seed = getattr(module, "MAY_SEED", False)
    offered = {"world": world, "network": network, "run": request.program and Torchrun(world), **request.offered}
    guard.install(request.pieces, request.guards, request.secret)
    SHARED_CODE.accept_changes()

    def refuse_changes(only_met_first: bool = True) -> None:
        if (changed := SHARED_CODE.find_change(only_met_first)) is not None:
            raise Wrong("forbidden", describe_change(changed))

    for name, test in tests.items():
        note.begin(name)
        if network is not None:
            network.begin()
        effects = None
        try:
            with _limit_memory(request.memory_bytes):
                loaded = _load_answer(request, world.rank, deferred)
                # Each call is followed by one look at what its result meets: here, or for a program, in `Answer`.
                effects = (
                    None if request.program else SideEffects(loaded, request.symbols, network, may_seed, refuse_changes)
                )
                offered["answer"] = Answer(loaded, note, *([refuse_changes] if request.program else []))
                test(**{key: offered[key] for key in parameters[name]})
                refuse_changes(only_met_first=False)
                if effects is not None:
                    effects.check()
                finding = None
        except BaseException as error:
            finding = finding_of(error, request.answer)
            if finding.kind == "network" and effects is not None and effects.found:
                # What broke may be a connection that the answer has made itself.
                finding = finding_of(Wrong("wrong", effects.found), request.answer)
        if guard.caught:
            finding = Finding("forbidden", guard.caught[0], line=guard.caught[1])
        if finding is not None:
            guard.stop()
            _store_and_raise(finding, note, world, request)
    return request.token


def _stop_at_breakpoint(*_, **__) -> None:
    """Raise BreakpointReached with the local variables of the caller, which has called `breakpoint()`."""
    variables = format_variables(sys._getframe(1))
    head = "breakpoint() ends a check, because nobody can type at a debugger there. Your variables at this line:"
    raise BreakpointReached("\n  ".join([head, *variables]))


def _store_and_raise(finding: Finding, note: RunningCall, world, request: Request) -> None:
    """Store the finding for the parent and end the job."""
    finding.test, finding.call = note.test, finding.call or note.text
    if finding.size == 1:  # else it is that of a process which the test has started
        finding.rank, finding.size = world.rank, world.size
    finding.source = _read_source_line(request.answer, finding.line)
    file = Path(f"{request.folder}/finding-{world.rank}")
    written = file.with_suffix(".part")
    written.write_text(json.dumps(asdict(finding)))
    written.rename(file)  # atomic: another rank's finding may end the job meanwhile
    raise FindingStored(finding.kind)


def _load_tests(request: Request) -> ModuleType:
    """Run the code of the tests as a module; return the module."""
    module = sys.modules["exercise_tests"] = ModuleType("exercise_tests")
    module.__file__ = request.test_file
    # torch looks up source lines of the call stack: it finds none, and does not open the file while an answer runs.
    linecache.cache[request.test_file] = (0, None, [], request.test_file)
    exec(marshal.loads(request.test_code), vars(module))
    return module


def _functions_by_name(symbol: str, value: Any) -> dict[str, Any]:
    """Return a function or the functions of a class, by name with that of the class."""
    return (
        {f"{symbol}.{name}": each for name, each in vars(value).items()} if inspect.isclass(value) else {symbol: value}
    )


def _is_deferred(function: Any) -> bool:
    """Return whether a call of the function runs nothing yet: it is a generator or an `async def`."""
    return inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)


def _deferred_functions(pieces: Sequence[str]) -> dict[str, bool]:
    """Return whether each function of the package's pieces is a generator or coroutine, by name."""
    split = [piece.split(":") for piece in pieces]
    found = {symbol: getattr(sys.modules.get(module), symbol, None) for module, symbol in split}
    every = [item for symbol, value in found.items() for item in _functions_by_name(symbol, value).items()]
    return {name: _is_deferred(function) for name, function in every if inspect.isroutine(function)}


def _load_answer(request: Request, rank: int, deferred: Mapping[str, bool]) -> ModuleType:
    """Load the learner's file. deferred: as `_deferred_functions` returns it."""
    module = load_answer_file(_MODULE, request.answer, rank)
    for symbol in request.symbols:
        value = getattr(module, symbol, None)
        if not (hasattr(module, symbol) if symbol.isupper() else callable(value)):
            raise Wrong("missing", f"your file must define {symbol}")
        for name, function in _functions_by_name(symbol, value).items():
            if inspect.iscoroutinefunction(function) and not deferred.get(name, True):
                raise Wrong("type", f"{name} must not be `async def`: a call returns a coroutine and runs nothing")
            if inspect.isgeneratorfunction(function) and not deferred.get(name, True):
                raise Wrong("type", f"{name} contains `yield`: a call returns a generator and runs nothing")
    return module


@contextlib.contextmanager
def _limit_memory(memory_bytes: int):
    """Return a context manager that limits this process to `memory_bytes` more memory than now.

    It also disables core files.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = _mapped_bytes()
    if now is not None:
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _mapped_bytes() -> int | None:
    """Return the address space of this process in bytes; None if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def finding_of(error: BaseException, answer: str) -> Finding:
    """Return the finding that an error in a test is, in the learner's terms. answer: the learner's file."""
    if isinstance(error, ProcessFailed):
        return error.finding
    line = _find_answer_line(error, answer)
    kind, text = type(error).__name__, _format_error(error)
    if isinstance(error, Wrong):
        return Finding(error.kind, text, error.case, error.expected, error.got, line=line)
    if isinstance(error, SyntaxError) and error.filename in (answer, None):
        return Finding("syntax", f"your file has a syntax error: {error.msg}", line=error.lineno)
    if isinstance(error, NotImplementedError) and line is not None:
        return Finding("unwritten", f"not written yet: {text}", line=line)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return Finding("memory", "your code needs more memory than a check allows", line=line)
    if isinstance(error, SystemExit):
        return Finding("exit", "your code ends the program (sys.exit)", line=line)
    if isinstance(error, BreakpointReached):
        return Finding("breakpoint", text, line=line)
    if isinstance(error, ForbiddenAction):
        return Finding("forbidden", text, line=line)
    if _is_network_error(error):
        return Finding("network", f"the connection to another rank broke: {_first_line(text)}", line=line)
    if line is None:
        what = f"the test could not use your code's result: {kind}: {_first_line(text)}"
        return Finding("type", what)
    return Finding("raised", f"your code raised {kind}: {_first_line(text)}", line=line)


def _format_error(error: BaseException) -> str:
    """Return the error's message, even if the learner's exception class fails to format it."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def _is_network_error(error: BaseException) -> bool:
    """Return whether an error came from communication with other ranks."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or type(error).__name__ == "CommError" or "gloo" in _format_error(error)


def _first_line(text: str) -> str:
    """Return the first line of a text, shortened; "no message" if it is empty."""
    return text.splitlines()[0][:160] if text else "no message"


def _find_answer_line(error: BaseException, answer: str) -> int | None:
    """Return the innermost line of the learner's file in the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == answer else line
        trace = trace.tb_next
    return line


def _read_source_line(file: str, line: int | None) -> str:
    """Return a line of a file without indentation; "" if there is none."""
    text: list[Any] = Path(file).read_text(errors="replace").splitlines() if line else []
    return text[line - 1].strip()[:100] if line and line <= len(text) else ""
