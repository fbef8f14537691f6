"""What is said when a job fails: who, why, and where the others stood. Ranks that stand alike are merged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minidist.errors import RunError, UserError, format_ranks
from minidist.tools.deadlock.detector import mismatched
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.deadlock.status_report import describe
from minidist.tools.launch.failure import RankError, RankFailure
from minidist.tools.launch.remote_rank import RemoteRank

_MAX_ERRORS = 5
_MAX_LINES = 6
_MAX_FRAMES = 4


def death_report(ranks: Sequence[RemoteRank], boards: Sequence[Snapshot | None]) -> RankFailure:
    """Ranks died. What peers raised because their connection broke is told as where they waited."""
    dead = [number for number, rank in enumerate(ranks) if rank.died]
    lines = [f"{format_ranks(same)} {death}" for death, same in _merge({n: ranks[n].death for n in dead}).items()]
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    own = {n: error for n, error in errors.items() if not error.from_network}
    lines += _merged_errors(own)
    # A backend may abort on sizes that do not fit: what the ranks had launched then says more than the signal.
    seen = {n: replace(s, state="died" if n in dead else s.state) for n, s in enumerate(boards) if s is not None}
    if verdict := mismatched(seen):
        return _failure(verdict.kind, verdict.ranks, [str(verdict), *lines], own)
    others = {n: _before_error(boards[n]) for n in range(len(ranks)) if n not in dead and n not in own}
    return _failure("died", dead, [*lines, *_standing(others)], own)


def error_report(ranks: Sequence[RemoteRank], boards: Sequence[Snapshot | None]) -> Exception:
    """Ranks raised. One UserError, or the RunError of all, that they agree on is raised here as it was there."""
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    if len({(error.kind, error.message) for error in errors.values()}) == 1:
        first = next(iter(errors.values()))
        if first.exit_code == UserError.exit_code:
            return UserError(first.message)
        if first.kind == RunError.__name__ and len(errors) == len(ranks):
            return RunError(first.message)
    # A backend may refuse what does not fit before the judge sees it: the boards also know the uses and the lines.
    verdict = mismatched({n: s for n, s in enumerate(boards) if s is not None})
    if verdict and all(error.from_network for error in errors.values()):
        return _failure(verdict.kind, verdict.ranks, [str(verdict)], errors)
    others = {n: boards[n] for n in range(len(ranks)) if n not in errors}
    return _failure("raised", list(errors), [*_merged_errors(errors), *_standing(others)], errors)


def deadline_report(deadline_s: float, boards: Sequence[Snapshot | None], stacks: Mapping[int, str]) -> RankFailure:
    """The job took too long: where each rank stood, by board and by Python stack."""
    lines = [f"the ranks were not done after {deadline_s:g} s"]
    lines += describe(dict(enumerate(boards)))
    short = {n: "\n".join(stack.splitlines()[:_MAX_FRAMES]) for n, stack in stacks.items()}
    for stack, same in _merge(short).items():
        lines += [f"{format_ranks(same)}, innermost call first:", *stack.splitlines()] if stack else []
    failure = _failure("deadline", range(len(boards)), lines, {})
    failure.stacks = dict(stacks)
    return failure


def _failure(kind: str, ranks: Sequence[int], lines: Sequence[str], errors: Mapping[int, RankError]) -> RankFailure:
    failure = RankFailure(kind, ranks, "\n".join(lines))
    failure.tracebacks = {n: error.traceback for n, error in errors.items()}
    for traceback, same in _merge(failure.tracebacks).items():
        failure.add_note(f"[{format_ranks(same)}] {traceback}")  # shown by an uncaught exception, not by str()
    return failure


def _merged_errors(errors: Mapping[int, RankError]) -> list[str]:
    """One short message per distinct error."""
    lines = []
    same = _merge({n: error._replace(traceback="") for n, error in errors.items()})
    for error, ranks in list(same.items())[:_MAX_ERRORS]:
        told = error.message.strip().splitlines() or [""]
        told = told[:_MAX_LINES] + (["..."] if len(told) > _MAX_LINES else [])
        lines += [f"{format_ranks(ranks)} raised {error.kind}: {told[0]}", *(f"  {line}" for line in told[1:])]
        lines += [f"  at {error.where}"] if error.where else []
    return lines + ([f"... and {len(same) - _MAX_ERRORS} other errors"] if len(same) > _MAX_ERRORS else [])


def _standing(others: Mapping[int, Snapshot | None]) -> list[str]:
    return ["meanwhile", *describe(others)] if others else []


def _before_error(snapshot: Snapshot | None) -> Snapshot | None:
    """Where a rank waited when the connection broke: a rank that failed says where it waited last."""
    if snapshot is not None and snapshot.state == "failed" and snapshot.channel is not None:
        return replace(snapshot, state="waiting")
    return snapshot


def _merge(by_rank: Mapping) -> dict:
    """Ranks with the same value, by value, in order of the first rank."""
    same: dict = {}
    for rank, value in sorted(by_rank.items()):
        same.setdefault(value, []).append(rank)
    return same
