"""Reports of failed jobs: which ranks failed, the cause, and the status of the others; equal ranks share a line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minidist.errors import RunError, UserError, format_ranks
from minidist.tools.deadlock.detector import find_operation_mismatch
from minidist.tools.deadlock.status_page import Snapshot
from minidist.tools.deadlock.status_report import describe_ranks
from minidist.tools.launch.failure import RankError, RankFailure
from minidist.tools.launch.rank_handle import RankHandle

_MAX_ERRORS = 5
_MAX_LINES = 6
_MAX_FRAMES = 4
_MAX_WIDTH = 240


def report_deaths(ranks: Sequence[RankHandle], snapshots: Sequence[Snapshot | None]) -> RankFailure:
    """Return a RankFailure that reports which ranks of a job died, why, and what the other ranks were doing.

    ranks: the handle of every rank. snapshots: the last status of every rank (see `StatusPage`); None if unreadable. A
    rank that raised only because its connection to a dead rank broke is reported as waiting.
    """
    dead = [number for number, rank in enumerate(ranks) if rank.has_died]
    lines = _describe_deaths({n: ranks[n] for n in dead})
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    own = {n: error for n, error in errors.items() if not error.is_connection_error}
    lines += _describe_errors(own)
    # gloo aborts on mismatched sizes in a thread of its own: the launched operations then explain more than the signal.
    seen = {n: replace(s, state="died" if n in dead else s.state) for n, s in enumerate(snapshots) if s is not None}
    if verdict := find_operation_mismatch(seen):
        failure = _make_rank_failure(verdict.kind, verdict.ranks, [str(verdict), *lines], own)
    else:
        others = {
            n: _get_status_before_error(snapshots[n]) for n in range(len(ranks)) if n not in dead and n not in own
        }
        failure = _make_rank_failure("died", dead, [*lines, *_describe_others(others)], own)
    failure.stacks = {n: ranks[n].crash_stack for n in dead if ranks[n].crash_stack}
    return failure


def report_errors(ranks: Sequence[RankHandle], snapshots: Sequence[Snapshot | None]) -> Exception:
    """Return the exception that reports which ranks of a job raised what.

    This is the UserError or RunError of the ranks if it is the only cause, otherwise a RankFailure. Errors that ranks
    raised because a connection to another rank broke are no causes.
    ranks: the handle of every rank. snapshots: the last status of every rank (see `StatusPage`); None if unreadable.
    """
    errors = {n: rank.error for n, rank in enumerate(ranks) if rank.error}
    causes = [error for error in errors.values() if not error.is_connection_error]
    if len({(error.kind, error.message) for error in causes}) == 1:
        first = causes[0]
        if first.exit_code == UserError.exit_code:
            return UserError(first.message)
        if first.kind == RunError.__name__ and (len(errors) == len(ranks) or not first.where):
            return RunError(first.message)
    # A backend may refuse a mismatch before deadlock detection sees it: the status also has the groups and lines.
    verdict = find_operation_mismatch({n: s for n, s in enumerate(snapshots) if s is not None})
    if verdict and all(error.is_connection_error for error in errors.values()):
        return _make_rank_failure(verdict.kind, verdict.ranks, [str(verdict)], errors)
    others = {n: snapshots[n] for n in range(len(ranks)) if n not in errors}
    return _make_rank_failure("raised", list(errors), [*_describe_errors(errors), *_describe_others(others)], errors)


def report_missed_deadline(
    deadline_s: float, snapshots: Sequence[Snapshot | None], stacks: Mapping[int, str]
) -> RankFailure:
    """Return a RankFailure that reports a job's missed deadline, with the status and the Python stack of each rank.

    deadline_s: the deadline in seconds after the start. snapshots: the last status of every rank (see `StatusPage`);
    None if unreadable. stacks: the Python stack by rank, as text.
    """
    lines = [f"the ranks were not done after {deadline_s:g} s"]
    lines += describe_ranks(dict(enumerate(snapshots)))
    short = {n: "\n".join(stack.splitlines()[:_MAX_FRAMES]) for n, stack in stacks.items()}
    for stack, same in _group_by_value(short).items():
        lines += [f"{format_ranks(same)}, innermost call first:", *stack.splitlines()] if stack else []
    failure = _make_rank_failure("deadline", range(len(snapshots)), lines, {})
    failure.stacks = dict(stacks)
    return failure


def _make_rank_failure(
    kind: str, ranks: Sequence[int], lines: Sequence[str], errors: Mapping[int, RankError]
) -> RankFailure:
    """Return a RankFailure whose report is `lines`; the tracebacks of `errors` are added as notes."""
    failure = RankFailure(kind, ranks, "\n".join(lines))
    failure.tracebacks = {n: error.traceback for n, error in errors.items()}
    for traceback, same in _group_by_value(failure.tracebacks).items():
        failure.add_note(f"[{format_ranks(same)}] {traceback}")  # shown by an uncaught exception, not by str()
    return failure


def _describe_errors(errors: Mapping[int, RankError]) -> list[str]:
    """Return one short message per distinct error, with the ranks that raised it."""
    lines = []
    same = _group_by_value({n: error._replace(traceback="") for n, error in errors.items()})
    for error, ranks in list(same.items())[:_MAX_ERRORS]:
        text = error.message.strip().splitlines() or [""]
        text = text[:_MAX_LINES] + (["..."] if len(text) > _MAX_LINES else [])
        lines += [f"{format_ranks(ranks)} raised {error.kind}: {text[0]}", *(f"  {line}" for line in text[1:])]
        lines += [f"  at {error.where}"] if error.where else []
    return lines + ([f"... and {len(same) - _MAX_ERRORS} other errors"] if len(same) > _MAX_ERRORS else [])


def _describe_deaths(dead: Mapping[int, RankHandle]) -> list[str]:
    """Return the cause of each death as text; after a crash also the C++ error and the innermost Python calls."""
    texts = {}
    for n, rank in dead.items():
        details = [*rank.abort_message.splitlines(), *rank.crash_stack.splitlines()[: 1 + _MAX_FRAMES]]
        texts[n] = "\n".join([rank.death_cause, *(f"  {line[:_MAX_WIDTH]}" for line in details)])

    groups = _group_by_value(texts)
    return [line for text, ranks in groups.items() for line in f"{format_ranks(ranks)} {text}".splitlines()]


def _describe_others(others: Mapping[int, Snapshot | None]) -> list[str]:
    """Return lines about what the other ranks were doing; [] if there are none."""
    return ["meanwhile", *describe_ranks(others)] if others else []


def _get_status_before_error(snapshot: Snapshot | None) -> Snapshot | None:
    """Return the status of a rank while it waited, if it failed because its connection broke; else its status."""
    if snapshot is not None and snapshot.state == "failed" and snapshot.wait_channel is not None:
        return replace(snapshot, state="waiting")
    return snapshot


def _group_by_value(by_rank: Mapping) -> dict:
    """Group ranks by equal value, in order of the first rank."""
    same: dict = {}
    for rank, value in sorted(by_rank.items()):
        same.setdefault(value, []).append(rank)
    return same
