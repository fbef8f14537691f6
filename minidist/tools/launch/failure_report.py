"""Reports of failed jobs: which ranks failed, why, and what the others were doing. Equal ranks share a line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minidist.errors import RunError, UserError, format_ranks
from minidist.tools.deadlock.detector import find_mismatch
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.deadlock.status_report import describe_ranks
from minidist.tools.launch.failure import RankError, RankFailure
from minidist.tools.launch.remote_rank import RemoteRank

_MAX_ERRORS = 5
_MAX_LINES = 6
_MAX_FRAMES = 4


def death_report(ranks: Sequence[RemoteRank], snapshots: Sequence[Snapshot | None]) -> RankFailure:
    """Report that ranks died. Peers that raised because their connection broke are shown where they waited."""
    dead = [number for number, rank in enumerate(ranks) if rank.died]
    lines = [f"{format_ranks(same)} {death}" for death, same in _merge({n: ranks[n].death_cause for n in dead}).items()]
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    own = {n: error for n, error in errors.items() if not error.from_network}
    lines += _merged_errors(own)
    # A backend may abort on find_mismatch sizes: the launched operations then explain more than the signal.
    seen = {n: replace(s, state="died" if n in dead else s.state) for n, s in enumerate(snapshots) if s is not None}
    if verdict := find_mismatch(seen):
        return _failure(verdict.kind, verdict.ranks, [str(verdict), *lines], own)
    others = {n: _before_error(snapshots[n]) for n in range(len(ranks)) if n not in dead and n not in own}
    return _failure("died", dead, [*lines, *_standing(others)], own)


def error_report(ranks: Sequence[RemoteRank], snapshots: Sequence[Snapshot | None]) -> Exception:
    """Report that ranks raised: a RankFailure, or their own UserError or RunError if it is the same on all of them."""
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    if len({(error.kind, error.message) for error in errors.values()}) == 1:
        first = next(iter(errors.values()))
        if first.exit_code == UserError.exit_code:
            return UserError(first.message)
        if first.kind == RunError.__name__ and len(errors) == len(ranks):
            return RunError(first.message)
    # A backend may refuse a mismatch before deadlock detection sees it: the status also has the groups and lines.
    verdict = find_mismatch({n: s for n, s in enumerate(snapshots) if s is not None})
    if verdict and all(error.from_network for error in errors.values()):
        return _failure(verdict.kind, verdict.ranks, [str(verdict)], errors)
    others = {n: snapshots[n] for n in range(len(ranks)) if n not in errors}
    return _failure("raised", list(errors), [*_merged_errors(errors), *_standing(others)], errors)


def deadline_report(deadline_s: float, snapshots: Sequence[Snapshot | None], stacks: Mapping[int, str]) -> RankFailure:
    """Report a missed deadline: the status and the Python stack of each rank."""
    lines = [f"the ranks were not done after {deadline_s:g} s"]
    lines += describe_ranks(dict(enumerate(snapshots)))
    short = {n: "\n".join(stack.splitlines()[:_MAX_FRAMES]) for n, stack in stacks.items()}
    for stack, same in _merge(short).items():
        lines += [f"{format_ranks(same)}, innermost call first:", *stack.splitlines()] if stack else []
    failure = _failure("deadline", range(len(snapshots)), lines, {})
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
    return ["meanwhile", *describe_ranks(others)] if others else []


def _before_error(snapshot: Snapshot | None) -> Snapshot | None:
    """The status of a failed rank as it was while it waited, before its connection broke."""
    if snapshot is not None and snapshot.state == "failed" and snapshot.channel is not None:
        return replace(snapshot, state="waiting")
    return snapshot


def _merge(by_rank: Mapping) -> dict:
    """Group ranks by equal value, in order of the first rank."""
    same: dict = {}
    for rank, value in sorted(by_rank.items()):
        same.setdefault(value, []).append(rank)
    return same
