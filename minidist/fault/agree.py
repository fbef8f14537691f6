"""Failing together: an action that one rank could not do has failed on all of them.

A rank that raises on its own leaves the others waiting for it in their next collective. So every rank says how its
part went, and all of them return or all of them raise, with one message.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from minidist.errors import UserError
from minidist.fault.index import DamagedError

GatherObjects = Callable[[Any], list]
Result = TypeVar("Result")


def gather_alone(value: Any) -> list:
    """The exchange of a group of one: it takes this rank's value and returns those of all ranks, in order."""
    return [value]


class CollectiveError(Exception):
    """What went wrong, on whichever ranks: the same text on all of them.

    damaged: whether on one of them it was a damaged checkpoint.
    """

    damaged = False


def run_on_all_ranks(exchange: GatherObjects, action: Callable[[], Result]) -> list[Result]:
    """Run `action` on every rank and return the results of all; raise FailedError on all when one of them raised."""
    result, failure, cause = None, None, None
    try:
        result = action()
    except Exception as error:
        # These were written to be read; of anything else the type is part of the message.
        plain = isinstance(error, UserError | ValueError | OSError)
        failure = (str(error) if plain else f"{type(error).__name__}: {error}", isinstance(error, DamagedError))
        cause = error
    outcomes = exchange((result, failure))
    ranks: dict[str, list[int]] = {}
    for at, (_, failed) in enumerate(outcomes):
        if failed:
            ranks.setdefault(failed[0].rstrip("."), []).append(at)
    if not ranks:
        return [result for result, _ in outcomes]
    messages = [f"{_who(at, len(outcomes))}{message}." for message, at in ranks.items()]
    more = [f"{len(messages) - 4} more ranks failed."] if len(messages) > 4 else []
    error = CollectiveError(" ".join(messages[:4] + more))
    error.damaged = any(failed and failed[1] for _, failed in outcomes)
    raise error from cause


def _who(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
