"""The two ways a command ends badly: the person asked for something impossible, or the run failed.

Both carry one message written for the person who can mend it; the command line prints the message and no traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was asked for is impossible; the message says what was given, what is possible and the one change to make.

    The process ends with exit code 2, and nothing on disk has changed.
    """

    exit_code = 2


class RunError(Exception):
    """A run that was possible failed (a rank died, ranks deadlocked, a loss was not finite). Exit code 1."""

    exit_code = 1
    # Whether it strikes some ranks and not others, so that rank 0 may have nothing to say of it.
    of_some_ranks = False


def suggest(given: str, possible: Iterable[str], most: int = 12) -> str:
    """The end of a message about an unknown name: the closest possible one, and all of them if they are few.

    most: how many names are listed when one of them is close.
    """
    names = list(possible)
    close = difflib.get_close_matches(given, names, 1)
    everything = f"possible: {', '.join(names) or 'none'}."
    if not close:
        return everything
    return f"did you mean {close[0]}?" + (f" {everything}" if len(names) <= most else "")
