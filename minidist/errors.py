"""Errors that end a command with one message, and how messages name ranks and numbers of things.

`UserError`: the request is impossible; `RunError`: the run failed; `CommError`: an operation between ranks failed. The
command line prints their message, written for the person who can fix the cause, and no traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Raised for an impossible request; the message says what was given, what is possible and the one change to make.

    The process ends with exit code 2, and nothing on disk has changed.
    """

    exit_code = 2


class DamagedError(UserError):
    """Raised if files of a checkpoint are missing, unreadable, or differ from those that were written."""


class MisfitError(UserError):
    """Raised if the tensors of a checkpoint are not those that are to be loaded: other names, shapes or dtypes."""


class RunError(Exception):
    """Raised if a valid run failed (a rank died, ranks deadlocked, a loss was not finite). Exit code 1."""

    exit_code = 1
    # Whether the error may occur on some ranks only, so that rank 0 may have nothing to report.
    of_some_ranks = False


class CommError(RunError):
    """Raised if an operation between ranks failed: a peer died, or the backend aborted it."""

    of_some_ranks = True


def suggest(given: str, possible: Iterable[str], max_listed: int = 12, prefix: str = "") -> str:
    """Return the end of a message about an unknown name: the closest possible name, and all names if they are few.

    given: the unknown name. possible: the known names. max_listed: if a name is close and there are more names than
    this, only the close one is listed. prefix: stands before each name in the message, as "train." does.
    """
    names = list(possible)
    close = difflib.get_close_matches(given, names, 1)
    everything = f"possible: {', '.join(prefix + name for name in names) or 'none'}."
    if not close:
        return everything
    return f"did you mean {prefix}{close[0]}?" + (f" {everything}" if len(names) <= max_listed else "")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text for a message: `rank 3`, `ranks 0-2, 5`."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things as text for a message: `1 step`, `2 steps`, `3 batches`.

    noun: the singular. plural: where it is not the noun with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
