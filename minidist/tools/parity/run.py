"""Run the cases on ranks of a rank server, and make one row of each from what its ranks saw."""

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer, usable_cores
from minidist.tools.parity.cases import STEPS, Case
from minidist.tools.parity.compare import First, not_held
from minidist.tools.parity.ranks import Record, first_file, record_file, run_cases, run_references

_POLL_S = 0.1


def run(
    server: RankServer, cases: Sequence[Case], deadline_s: float | None = None
) -> Iterator[tuple[Case, dict | str]]:
    """Each case, as it ends, with its row of the table, or with the reason why it has none (its ranks failed).

    deadline_s: for all cases of one world together; by default generous. After a failure the cases that are left go on
    with fresh ranks. Every rank has one thread: the model is so small that more only wait for each other.
    """
    references = list(dict.fromkeys(case.reference for case in cases))
    with tempfile.TemporaryDirectory(prefix="minidist-parity-") as folder:
        processes = min(usable_cores(), len(references))
        server.run(
            run_references, processes, (references, folder), backend=None, deadline_s=_deadline_s(references), threads=1
        )
        for world in sorted({case.world for case in cases}):
            numbered = [
                (number, case, references.index(case.reference))
                for number, case in enumerate(cases)
                if case.world == world
            ]
            yield from _run_world(server, world, numbered, folder, deadline_s)


def _deadline_s(cases: Sequence) -> float:
    return 60.0 + 5.0 * len(cases)


def _run_world(
    server: RankServer, world: int, left: list[tuple[int, Case, int]], folder: str, deadline_s: float | None
) -> Iterator[tuple[Case, dict | str]]:
    while left:
        limit_s = _deadline_s(left) if deadline_s is None else deadline_s
        job = server.start(run_cases, world, (left, folder), deadline_s=limit_s, threads=1)
        failure, ended = None, False
        try:
            while not ended:
                ended = job.poll(_POLL_S)
                while left and (records := _records(folder, left[0][0], world)):
                    yield left[0][1], row_of(left[0][1], records)
                    left = left[1:]
            job.wait()
        except (RunError, UserError) as error:
            failure = error
        finally:
            if not job.done:
                job.kill()
        if failure is None and left:
            failure = RunError(f"the ranks returned, but left no record of {left[0][1].name}")
        if failure is not None:
            if not left:  # after the last row: nothing that could be marked as not run
                raise failure
            yield left[0][1], _why(folder, left[0][0], world, failure)
            left = left[1:]


def _why(folder: str, number: int, world: int, failure: Exception) -> str:
    """Why a case has no row: what was wrong already, if anything, and how the ranks ended."""
    files = [first_file(folder, number, rank) for rank in range(world)]
    wrong = _first_of([pickle.loads(file.read_bytes()) if file.exists() else None for file in files])
    return f"{wrong} is wrong; then\n{failure}" if wrong else str(failure)


def _records(folder: str, number: int, world: int) -> list[Record] | None:
    """What all ranks saw in a case; None while one has not finished it."""
    files = [record_file(folder, number, rank) for rank in range(world)]
    if not all(file.exists() for file in files):
        return None
    return [pickle.loads(file.read_bytes()) for file in files]


def row_of(case: Case, records: Sequence[Record]) -> dict:
    """One row of the table. It is ok when no rank saw anything wrong and the ranks, taken together, are not wrong."""
    largest = {kind: max(record.largest[kind] for record in records) for kind in records[0].largest}
    _, worst = max((record.worst for record in records), key=lambda pair: pair[0])
    first_wrong = _first_of([record.first for record in records]) or _wrong_together(case, records)
    return {
        "layout": case.layout,
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
    }


def _first_of(by_rank: Sequence[First | None]) -> str | None:
    """What is wrong first on any rank, and on which ranks if not on all."""
    firsts = {rank: first for rank, first in enumerate(by_rank) if first is not None}
    if not firsts:
        return None
    text = min(firsts.values())[1]
    same = [rank for rank, first in firsts.items() if first[1] == text]
    if len(same) == len(by_rank):
        return text
    return f"{text} on rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}"


def _wrong_together(case: Case, records: Sequence[Record]) -> str | None:
    """What no rank sees alone: a tensor nobody compared, replicas that differ in a bit, `clip` without clipping."""
    for name, shape in records[0].shapes.items():
        if not_held(shape, [box for record in records for box in record.held.get(name, ())]):
            return f"step 0 param {name} is not held by any rank, or not all of it"
        for (a, one), (b, other) in combinations(enumerate(records), 2):
            alike = name in one.held and one.held[name] == other.held.get(name)
            if alike and one.digests[name] != other.digests[name]:
                return f"end param {name} differs between its replicas on ranks {a} and {b}"
    for rank, record in enumerate(records):
        if record.told != records[0].told:
            step = next(at for at, pair in enumerate(record.told) if pair != records[0].told[at])
            return f"step {step} loss or grad_norm is not told alike by ranks 0 and {rank}"
    if case.clip and not 0 < records[0].clipped_steps < STEPS:
        return f"the reference clipped in {records[0].clipped_steps} of {STEPS} steps, and this case has some of each"
    return None
