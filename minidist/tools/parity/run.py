"""Runs the cases on a rank server and makes one table row of each from the reports of its ranks."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer, usable_cores
from minidist.tools.parity.cases import STEPS, Case
from minidist.tools.parity.compare import FirstDifference, has_uncovered_elements
from minidist.tools.parity.ranks import RankReport, first_difference_file, report_file, run_cases, train_references

_POLL_S = 0.1


def run(
    server: RankServer,
    cases: Sequence[Case],
    deadline_s: float | None = None,
    prepare: Callable[[], object] | None = None,
) -> Iterator[tuple[Case, dict | str]]:
    """Train all cases on ranks of `server`; yield each case, as it ends, with its row of the result table.

    If the ranks of a case failed, yield the reason instead of the row. deadline_s: seconds for all cases of one world
    size together; None for 60 s and 5 s per case. prepare: called on every rank before its first case, not in the
    processes that train the references; it may return a Counter of calls (see `run_cases`). After a failure the
    remaining cases run on new ranks. Every rank has one thread, as more do not speed up so small a model.
    """
    references = list(dict.fromkeys(case.reference_case for case in cases))
    with tempfile.TemporaryDirectory(prefix="minidist-parity-") as folder:
        processes = min(usable_cores(), len(references))
        server.run(
            train_references,
            processes,
            (references, folder),
            backend=None,
            deadline_s=_default_deadline_s(references),
            threads=1,
        )
        for world in sorted({case.world_size for case in cases}):
            numbered = [
                (number, case, references.index(case.reference_case))
                for number, case in enumerate(cases)
                if case.world_size == world
            ]
            yield from _run_on_ranks(server, world, numbered, folder, deadline_s, prepare)


def _default_deadline_s(cases: Sequence) -> float:
    """Return the seconds that these cases may take together."""
    return 60.0 + 5.0 * len(cases)


def _run_on_ranks(
    server: RankServer,
    world: int,
    left: list[tuple[int, Case, int]],
    folder: str,
    deadline_s: float | None,
    prepare: Callable[[], object] | None,
) -> Iterator[tuple[Case, dict | str]]:
    """Train the cases in `left` on `world` ranks; yield each with its row, or the reason why it failed.

    left: (number, case, number of its reference). folder: of references and reports. After a failure the cases behind
    it run on new ranks.
    """
    while left:
        limit_s = _default_deadline_s(left) if deadline_s is None else deadline_s
        job = server.start(run_cases, world, (left, folder, prepare), deadline_s=limit_s, threads=1)
        failure, ended = None, False
        try:
            while not ended:
                ended = job.poll(_POLL_S)
                while left and (records := _read_reports(folder, left[0][0], world)):
                    yield left[0][1], make_table_row(left[0][1], records)
                    left = left[1:]
            job.wait()
        except (RunError, UserError) as error:
            failure = error
        finally:
            if not job.has_ended:
                job.kill()
        if failure is None and left:
            failure = RunError(f"the ranks returned, but left no report of {left[0][1].name}")
        if failure is not None:
            if not left:  # after the last row, no case is left to mark as not run
                raise failure
            yield left[0][1], _explain_failure(folder, left[0][0], world, failure)
            left = left[1:]


def _explain_failure(folder: str, number: int, world: int, failure: Exception) -> str:
    """Return why a case has no row: the first difference, if a rank found one, and how the ranks failed."""
    files = [first_difference_file(folder, number, rank) for rank in range(world)]
    wrong = _describe_first_difference([pickle.loads(file.read_bytes()) if file.exists() else None for file in files])
    return f"{wrong} is wrong; then\n{failure}" if wrong else str(failure)


def _read_reports(folder: str, number: int, world: int) -> list[RankReport] | None:
    """Return the reports of all ranks about case `number`; None while one is missing."""
    files = [report_file(folder, number, rank) for rank in range(world)]
    if not all(file.exists() for file in files):
        return None
    return [pickle.loads(file.read_bytes()) for file in files]


def make_table_row(case: Case, reports: Sequence[RankReport]) -> dict:
    """Combine the reports of a case's ranks into one row of the result table.

    The row is ok if no rank found a difference beyond its tolerance and the ranks agree with each other. A difference
    is None where that kind of value was not compared. If the reports have calls, so does the row: a dict for each rank.
    """
    largest = {kind: max(report.largest[kind] for report in reports) for kind in reports[0].largest}
    if case.has_own_gradients:
        largest |= dict.fromkeys(("loss", "grad", "grad_norm"))  # not compared
    _, worst = max((report.worst for report in reports), key=lambda pair: pair[0])
    first_wrong = _describe_first_difference([report.first for report in reports]) or _find_cross_rank_fault(
        case, reports
    )
    calls = [report.calls for report in reports]
    return {
        "layout": case.description,
        "dtype": case.dtype,
        "optimizer": case.optimizer,
        "loss_diff": largest["loss"],
        "grad_diff": largest["grad"],
        "grad_norm_diff": largest["grad_norm"],
        "param_diff": largest["param"],
        "worst_tensor": worst,
        "first_wrong": first_wrong,
        "tolerance": dict(case.tolerance),
        "ok": first_wrong is None,
    } | ({} if None in calls else {"calls": calls})


def _describe_first_difference(by_rank: Sequence[FirstDifference | None]) -> str | None:
    """Return the first difference on any rank as text, with its ranks if not all found it; None without one."""
    firsts = {rank: first for rank, first in enumerate(by_rank) if first is not None}
    if not firsts:
        return None
    text = min(firsts.values())[1]
    same = [rank for rank, first in firsts.items() if first[1] == text]
    if len(same) == len(by_rank):
        return text
    return f"{text} on rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}"


def _find_cross_rank_fault(case: Case, records: Sequence[RankReport]) -> str | None:
    """Return a fault that only a comparison of the ranks shows, as text; None if there is none.

    Such faults: elements that no rank has, replicas that are not bitwise equal, ranks that return different losses, and
    `clip` without clipping.
    """
    for name, shape in records[0].shapes.items():
        if has_uncovered_elements(shape, [box for record in records for box in record.boxes.get(name, ())]):
            return f"step 0 param {name} is not on any rank, or only in part"
        for (a, one), (b, other) in combinations(enumerate(records), 2):
            same_box = name in one.boxes and one.boxes[name] == other.boxes.get(name)
            if same_box and one.digests[name] != other.digests[name]:
                return f"end param {name} differs between its replicas on ranks {a} and {b}"
    for rank, record in enumerate(records):
        if record.scalars != records[0].scalars:
            step = next(step for step, pair in enumerate(record.scalars) if pair != records[0].scalars[step])
            return f"step {step} loss or grad_norm differs between ranks 0 and {rank}"
    if case.clip and not 0 < records[0].num_reference_clips < STEPS:
        clips = records[0].num_reference_clips
        return f"the reference clipped in {clips} of {STEPS} steps; this case needs both kinds of steps"
    return None
