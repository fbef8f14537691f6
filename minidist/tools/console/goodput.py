"""Goodput: the useful step time of a run over its wall time, with all its attempts, and the lost time by cause.

The wall time runs from the moment at which rank 0 of the first attempt begins to build its trainer. Every second of it
is assigned to one category when it has passed, so useful and lost time always add up to the wall time. Each row of
metrics.jsonl has the seconds of each category, and a resumed attempt adds to those of the attempt before:

useful             steps whose update is part of the final model, with loading their data
starting           building the model and the data, in an attempt that begins at step 0
resuming           the same, and loading the checkpoint, in an attempt that resumes
saving             the time for which saving a checkpoint stalls training
evaluation         evaluations on held-out text
reporting          logging, metrics and the sample of text
skipped steps      steps without an update
lost steps         steps after the checkpoint from which the run was resumed, which had to be taken again
between attempts   from the last row of an attempt to the begin of the next: steps that no row reports, the detection
                   of the failure, and the restart; not after the end of a complete run that is resumed for more steps
live recovery      from the last row before ranks died or arrived until the others go on with another number of ranks:
                   the interrupted step, the detection, new process groups, and the state from the memory of the ranks
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

USEFUL = "useful"
_KEY = "time"


class TimeAccounts:
    """The wall time of a run by category, in seconds: useful steps, saving, evaluation, lost steps, ...

    The module's docstring lists the categories. Rank 0 keeps this object. clock: returns the Unix time in seconds.
    seconds: by category. charged_until_s: the Unix time up to which all time is assigned. step: the number of
    completed steps, which the caller sets. is_closed: set by the caller if the run is complete, so that no more time is
    charged.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self.seconds: Counter[str] = Counter()
        self.step = 0
        self.is_closed = False
        self.charged_until_s = clock()

    def charge(self, account: str, until_s: float | None = None) -> None:
        """Assign the time since the last call to `account`, a category of time such as "saving".

        until_s: the Unix time up to which to assign; None for now.
        """
        if self.is_closed:
            return
        until_s = self._clock() if until_s is None else until_s
        self.seconds[account] += until_s - self.charged_until_s
        self.charged_until_s = until_s

    def now(self) -> float:
        """Return the Unix time in seconds, by the clock of this object."""
        return self._clock()

    @property
    def wall_s(self) -> float:
        """The wall time in seconds of all categories together, in all attempts of the run."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the wall time that went into useful steps, from 0 to 1."""
        return self.seconds[USEFUL] / self.wall_s if self.wall_s else 0.0

    def continue_from(self, rows: Sequence[dict[str, Any]], step: int, gap_account: str = "between attempts") -> None:
        """Add the seconds of the earlier attempts of the run, by category. Call it before the first `charge`.

        rows: the rows of metrics.jsonl that the previous attempt has left. step: the step from which this attempt
        resumes; the useful time of later steps becomes time of lost steps. gap_account: the category of the time since
        the last row.
        """
        rows = [row for row in rows if _KEY in row]
        if not rows:
            return
        last, self.step = rows[-1][_KEY], step
        useful = [(row[_KEY]["step"], row[_KEY]["useful_s"]) for row in rows]
        useful += [(row["saved_step"], row["useful_s"]) for row in rows if "saved_step" in row]
        kept = max((useful_s for at, useful_s in useful if at <= step), default=0.0)
        self.seconds.update(last["lost"])
        self.seconds[USEFUL] = kept
        self.seconds["lost steps"] += last["useful_s"] - kept
        if not is_end_of_complete_run(rows):
            self.seconds[gap_account] += self.charged_until_s - last["at"]

    def as_row(self) -> dict[str, Any]:
        """Return the entries for a metrics.jsonl row: goodput and seconds by category, which `continue_from` reads.

        "goodput": a fraction. "time": a dict with "at", the Unix time in seconds up to which time is assigned; "step",
        the number of completed steps; "useful_s", the useful seconds; and "lost", the seconds of each other category.
        """
        lost = {name: seconds for name, seconds in sorted(self.seconds.items()) if name != USEFUL}
        useful_s = self.seconds[USEFUL]
        return {
            "goodput": self.goodput,
            _KEY: {"at": self.charged_until_s, "step": self.step, "useful_s": useful_s, "lost": lost},
        }

    def describe(self) -> str:
        """Return a line of text with the goodput, and the lost seconds by category, the largest first."""
        lost = [(seconds, name) for name, seconds in self.seconds.items() if name != USEFUL]
        parts = [f"{name} {seconds:.1f} s" for seconds, name in sorted(lost, reverse=True) if seconds >= 0.05]
        useful_s = self.seconds[USEFUL]
        line = f"goodput {100 * self.goodput:.0f} %: {useful_s:.1f} s of useful steps in {self.wall_s:.1f} s"
        return f"{line}; lost: {', '.join(parts)}" if parts else line


def is_end_of_complete_run(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether the rows of metrics.jsonl end with a run that was trained and evaluated to its last step."""
    return bool(rows) and rows[-1].get("complete") is True


def has_valid_accounts(row: dict[str, Any]) -> bool:
    """Return whether the time categories of a metrics.jsonl row have the form of `TimeAccounts.as_row`.

    A row without them is valid.
    """
    if _KEY not in row:
        return True
    accounts = row[_KEY]
    if not isinstance(accounts, dict) or not isinstance(accounts.get("lost"), dict):
        return False
    numbers = [*(accounts.get(name) for name in ("at", "step", "useful_s")), *accounts["lost"].values()]
    numbers += [row.get("useful_s")] if "saved_step" in row else []
    return all(isinstance(number, int | float) for number in numbers)
