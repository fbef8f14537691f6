"""Grades a class: `python -m exercises grade FOLDER`.

The folder has a folder or a zip file per student (see `exercises.submissions`). Every answer in it is checked in a
sandbox, by several worker processes with a warm rank server each; every student gets a new sandbox. Each check gives a
record, which is appended to `FOLDER.grades.jsonl` at once. A run that was stopped, or is repeated after new
submissions, checks only what has no record for the same file and the same version of the course.
"""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from exercises.catalogue import Catalogue, Exercise
from exercises.check import check, modules_to_preload
from exercises.report import MAX_LINES, as_json, format_finding
from exercises.sandbox import SandboxedRankServer
from exercises.stuck_ranks import find_stuck_ranks
from exercises.submissions import Submission, digest
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer
from minidist.tools.output_files import write_atomically

CHECK_LIMIT_S = 300.0
_STOP_S = 15.0
_UNPRINTABLE = {code: None for code in [*range(32), *range(127, 160)] if code not in (9, 10)}


@dataclass(frozen=True)
class Record:
    """The outcome of one check.

    verdict: "passed", "failed", "missing" (no file), "unreadable" (the file cannot be read) or "error" (the check
    itself failed, and is repeated by the next run). points: earned, out of `of`. test: the first failed test, kind: of
    its finding, message: about it. tests: of each test its id, points, `of` and kind. sha256: of the file. course: the
    version of the course. seconds: that the check took. finished: when, in UTC. sandbox: the kind.
    """

    student: str
    exercise: str
    chapter: str
    verdict: str
    points: int
    of: int
    test: str = ""
    kind: str = ""
    message: str = ""
    sha256: str = ""
    course: str = ""
    seconds: float = 0.0
    finished: str = ""
    sandbox: str = ""
    tests: tuple[dict, ...] = ()


class Records:
    """The records of a folder of submissions, in a file with a JSON object per line."""

    def __init__(self, file: Path):
        self.file = file
        self._by_check: dict[tuple[str, str], Record] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):  # a line that a killed run has not completed
                    self._remember(Record(**json.loads(line)))

    def _remember(self, record: Record) -> None:
        """Store a record by student and exercise; a later one replaces it."""
        self._by_check[record.student, record.exercise] = record

    def add(self, record: Record) -> None:
        """Append a record to the file."""
        self._remember(record)
        with self.file.open("a") as file:
            if file.tell() and not self._ends_with_newline():
                file.write("\n")
            file.write(json.dumps(asdict(record)) + "\n")

    def _ends_with_newline(self) -> bool:
        """Return whether the file ends with a complete line."""
        with self.file.open("rb") as file:
            file.seek(-1, io.SEEK_END)
            return file.read(1) == b"\n"

    def find(self, student: str, exercise: str, sha256: str, course: str) -> Record | None:
        """Return the record of a check of this file with this version of the course; None if there is none."""
        record = self._by_check.get((student, exercise))
        same = record is not None and record.verdict != "error" and (record.sha256, record.course) == (sha256, course)
        return record if same else None

    def of(self, submissions: Sequence[Submission], exercises: Sequence[Exercise]) -> list[Record]:
        """List the records of these students and exercises, in this order."""
        pairs = [(submission.student, exercise.name) for submission in submissions for exercise in exercises]
        return [self._by_check[pair] for pair in pairs if pair in self._by_check]


@dataclass(frozen=True)
class _Task:
    """One check to do. content: of the answer's file."""

    student: str
    exercise: str
    content: bytes


class Grader:
    """Checks the answers of a class.

    kind: of the sandbox, "none" for none. jobs: number of worker processes. limit_s: of one check. Raises UserError if
    the sandbox cannot be had.
    """

    def __init__(
        self, catalogue: Catalogue, records: Records, kind: str = "auto", jobs: int = 2, limit_s: float = CHECK_LIMIT_S
    ):
        self._catalogue, self._records, self._jobs, self._limit_s = catalogue, records, jobs, limit_s
        self.kind, self.protections = _describe_sandbox(kind)
        self.course = course_version(catalogue.root)

    def run(
        self,
        submissions: Sequence[Submission],
        exercises: Sequence[Exercise],
        on_record: Callable[[Record, bool], None] = lambda record, fresh: None,
    ) -> None:
        """Check every answer that has no record. on_record: called with each record, and whether it is a new one."""
        queues: list[list[_Task]] = []
        for submission in submissions:
            tasks = []
            for exercise in exercises:
                content = submission.answers.get(exercise.name)
                sha256 = digest(content) if content is not None else ""
                known = self._records.find(submission.student, exercise.name, sha256, self.course)
                if content is None:
                    problem = submission.problems.get(exercise.name)
                    record = self._make_record(
                        submission.student, exercise, "unreadable" if problem else "missing", message=problem or ""
                    )
                    if known is None or (known.verdict, known.message) != (record.verdict, record.message):
                        self._records.add(record)
                    on_record(record, False)
                elif known is not None:
                    on_record(known, False)
                else:
                    tasks.append(_Task(submission.student, exercise.name, content))
            if tasks:
                queues.append(tasks)
        workers = [_Worker(self.kind, self._catalogue.root) for _ in range(min(self._jobs, len(queues)))]
        try:
            self._run_tasks(workers, queues, on_record)
        finally:
            for worker in workers:
                worker.ask_to_stop()
            for worker in workers:
                worker.stop()

    def _run_tasks(self, workers: list["_Worker"], queues: list[list[_Task]], on_record) -> None:
        """Let the workers check the answers of `queues`, one queue per student, until all are done."""
        while True:
            for worker in workers:
                if worker.task is None:
                    if not worker.queue and queues:
                        worker.queue = queues.pop(0)
                    if worker.queue:
                        worker.begin(worker.queue.pop(0))
            busy = {worker.connection: worker for worker in workers if worker.task is not None}
            if not busy:
                return
            ready = wait(busy, timeout=1.0)
            for connection, worker in busy.items():
                task, exercise = worker.task, self._catalogue[worker.task.exercise]
                if connection in ready:
                    found = worker.take()
                elif time.monotonic() - worker.began_s > self._limit_s:
                    found = {"verdict": "failed", "kind": "slow"}
                    found["message"] = f"the check had not ended after {self._limit_s:g} s, and was stopped"
                    worker.restart()
                else:
                    continue
                record = self._make_record(task.student, exercise, sha256=digest(task.content), **found)
                self._records.add(record)
                on_record(record, True)

    def _make_record(self, student: str, exercise: Exercise, verdict: str, **values) -> Record:
        """Return the record of a check that ends now. values: further fields."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        values = {"points": 0, "course": self.course, "finished": now, "sandbox": self.kind, **values}
        return Record(student, exercise.name, exercise.chapter, verdict, of=exercise.points, **values)


class _Worker:
    """A process that checks one answer at a time.

    task: the check that runs now, or None. queue: further tasks of the same student.
    """

    def __init__(self, kind: str, root: Path):
        self._arguments = (kind, root)
        self.task: _Task | None = None
        self.queue: list[_Task] = []
        self._start()

    def _start(self) -> None:
        """Start the process."""
        kind, root = self._arguments
        self.connection, theirs = Pipe()
        # Not multiprocessing.Process: it starts a resource tracker, which outlives the grading.
        program = f"from exercises.grade import run_worker; run_worker({theirs.fileno()}, {kind!r}, {str(root)!r})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        descriptors = {"pass_fds": [theirs.fileno()], "env": environment}
        self._process = subprocess.Popen([sys.executable, "-c", program], **descriptors)
        theirs.close()

    def begin(self, task: _Task) -> None:
        """Send a task to the process."""
        self.task, self.began_s = task, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which the next reading shows
            self.connection.send(task)

    def take(self) -> dict:
        """Return what the process has found, or that it has died; then a new one is started."""
        try:
            found, self.task = self.connection.recv(), None
        except (EOFError, OSError):
            self.restart()
            return {"verdict": "error", "message": "the process that checked this answer has died"}
        return found

    def restart(self) -> None:
        """End the process and start a new one."""
        self.task = None
        self.ask_to_stop()
        self.stop()
        self._start()

    def ask_to_stop(self) -> None:
        """Ask the process to end its sandbox and itself."""
        self._process.terminate()

    def stop(self) -> None:
        """Wait for the end of the process; kill it if it does not end."""
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()


def run_worker(descriptor: int, kind: str, root: str) -> None:
    """Run a worker process: check the tasks that arrive on the connection of this file descriptor, until it closes.

    kind: of sandbox. root: of the course.
    """
    connection, root = Connection(descriptor), Path(root)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process by SIGTERM
    signal.signal(signal.SIGTERM, _exit_by_signal)
    catalogue, measured, student = Catalogue(root), {}, None
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt), _start_server(kind, root) as server:
        while True:
            task = connection.recv()
            if student not in (None, task.student) and kind != "none":
                server.renew()
            student = task.student
            with contextlib.suppress(RunError):  # the check reports it
                server.ensure_ready()
            start_s = time.monotonic()
            found = _check(catalogue[task.exercise], task.content, server, measured)
            connection.send({**found, "seconds": round(time.monotonic() - start_s, 2)})
            if kind != "none":
                try:
                    left = server.left_behind()
                except (RunError, OSError):
                    left = ["the server has died"]
                if left:
                    server.renew()


def _exit_by_signal(number: int, _frame) -> None:
    """End this process by SystemExit, once, with 128 plus the signal's number."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _start_server(kind: str, root: Path) -> RankServer:
    """Start a rank server, in a sandbox unless `kind` is "none", with the modules of all tests."""
    preload = modules_to_preload(Catalogue(root).values())
    return RankServer(preload=preload) if kind == "none" else SandboxedRankServer(kind, preload, root)


def _check(exercise: Exercise, content: bytes, server: RankServer, measured: dict) -> dict:
    """Check one answer; return the fields of its record."""
    try:
        if exercise.kind == "predict" and exercise.name not in measured:  # our own program, so outside the sandbox
            with RankServer(preload=()) as trusted:
                names = [test.id for test in exercise.tests()]
                measured[exercise.name] = find_stuck_ranks(exercise.source, names, trusted)
        with tempfile.TemporaryDirectory(prefix="minidist-grade-") as folder:
            file = Path(folder, exercise.chapter, f"{exercise.name}.py")
            file.parent.mkdir()
            file.write_bytes(content)
            verdict = check(exercise, file, server, measured=measured.get(exercise.name))
    except Exception as error:  # the learner's code can do anything to its ranks: the others must be graded
        return {"verdict": "error", "message": f"the check failed: {type(error).__name__}: {error}"[:500]}
    found = {"verdict": "passed" if verdict.passed else "failed", "points": verdict.points}
    if verdict.reported is not None:
        finding = verdict.reported.finding
        found |= {"test": verdict.reported.id, "kind": _strip_control_characters(str(finding.kind))}
        found["message"] = _strip_control_characters("\n".join(format_finding(finding, MAX_LINES)))
    tests = as_json(verdict)["tests"]
    return found | {"tests": tuple({key: test[key] for key in ("id", "points", "of", "kind")} for test in tests)}


def _strip_control_characters(text: str) -> str:
    """Return the text without the control characters with which it could change a terminal."""
    return text.translate(_UNPRINTABLE)[:4000]


def _describe_sandbox(kind: str) -> tuple[str, list[str]]:
    """Return the kind of sandbox that this machine has, and what it protects. Raises UserError if it has none."""
    if kind == "none":
        return kind, ["sandbox: NONE. The submissions run with all your rights: grade only code that you trust"]
    try:
        with SandboxedRankServer(kind, preload=()) as server:
            server.ensure_ready()
            return server.kind, server.protections
    except RunError as error:
        raise UserError(f"the sandbox does not start: {error}") from None


def course_version(root: Path) -> str:
    """Return the start of the hash of everything that decides a verdict: tests, exercises, grader and package."""
    files = [*(root / "minidist").rglob("*.py"), *(root / "exercises").rglob("*.py")]
    files += (root / "exercises").glob("ch*/exercise.toml")
    contents = [f"{file.relative_to(root)} {digest(file.read_bytes())}\n" for file in sorted(files)]
    return digest("".join(contents).encode())[:12]


def write_csv(records: Sequence[Record], file: Path) -> None:
    """Write one line per check. A text that a spreadsheet would take for a formula gets an apostrophe before it."""
    names = [item.name for item in fields(Record) if item.name != "tests"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    for record in records:
        values = [getattr(record, name) for name in names]
        writer.writerow([f"'{v}" if isinstance(v, str) and v.startswith(("=", "+", "-", "@")) else v for v in values])
    write_atomically(file, text.getvalue().encode())


def write_json(records: Sequence[Record], file: Path, course: str, protections: Sequence[str]) -> None:
    """Write the points of each student and all records."""
    content = {
        "course": course,
        "sandbox": list(protections),
        "students": {name: dict(zip(("points", "of"), found, strict=True)) for name, found in totals(records).items()},
        "records": [asdict(record) for record in records],
    }
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


def totals(records: Sequence[Record]) -> Mapping[str, tuple[int, int]]:
    """Return each student's points and the possible points."""
    found: dict[str, tuple[int, int]] = {}
    for record in records:
        points, of = found.get(record.student, (0, 0))
        found[record.student] = points + record.points, of + record.of
    return found


@contextlib.contextmanager
def show_progress(total: int) -> Iterator[Callable[[Record, bool], None]]:
    """Return a context manager for a progress bar on stderr; its value takes each record.

    Where stderr is no terminal, each new record is a line instead.
    """
    console = Console(stderr=True)
    if not console.is_terminal:

        def print_line(record: Record, fresh: bool) -> None:
            if fresh:
                said = f"{record.student} {record.exercise}: {record.verdict}, {record.points} of {record.of} points"
                print(f"{said}, {record.seconds:.1f} s", file=sys.stderr, flush=True)

        yield print_line
        return
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total, now="")

        def advance(record: Record, fresh: bool) -> None:
            progress.update(bar, advance=1, now=f"{record.student} {record.exercise}: {record.verdict}")

        yield advance
