"""Collective error handling: an action that fails on one rank fails on all of them, with one message.

A rank that raises alone leaves the others waiting for it in their next collective. So the ranks exchange their outcomes
after the action, and either all of them return or all of them raise.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from minidist.errors import DamagedError, UserError, format_ranks

GatherObjects = Callable[[Any], list]
Result = TypeVar("Result")


def gather_single_rank(value: Any) -> list:
    """Return [value]: the all-gather of Python objects for a single process, which is a group of one rank."""
    return [value]


class ErrorOnAnyRank(Exception):
    """Raised by `run_on_all_ranks` on all ranks, with the same message, if its action failed on at least one of them.

    found_damage: whether the action raised DamagedError on any rank.
    """

    found_damage = False


def run_on_all_ranks(all_gather_object: GatherObjects, action: Callable[[], Result]) -> list[Result]:
    """Collective: run `action` on every rank and return the results of all ranks, in rank order.

    all_gather_object: takes this rank's value and returns the values of all ranks, in order. If the action raises on
    any rank, raises ErrorOnAnyRank on all.
    """
    result, failure, cause = None, None, None
    try:
        result = action()
    except Exception as error:
        # The messages of these errors are complete sentences; any other error needs its type in front.
        plain = isinstance(error, UserError | ValueError | OSError)
        failure = (str(error) if plain else f"{type(error).__name__}: {error}", isinstance(error, DamagedError))
        cause = error
    outcomes = all_gather_object((result, failure))
    ranks: dict[str, list[int]] = {}
    for at, (_, failed) in enumerate(outcomes):
        if failed:
            ranks.setdefault(failed[0].rstrip("."), []).append(at)
    if not ranks:
        return [result for result, _ in outcomes]
    failed_ranks = ["" if len(at) == len(outcomes) else f"{format_ranks(at)}: " for at in ranks.values()]
    messages = [f"{prefix}{message}." for prefix, message in zip(failed_ranks, ranks, strict=True)]
    more = [f"{len(messages) - 4} more ranks failed."] if len(messages) > 4 else []
    error = ErrorOnAnyRank(" ".join(messages[:4] + more))
    error.found_damage = any(failed and failed[1] for _, failed in outcomes)
    raise error from cause
