"""Schedules as text, a line for each stage, written by hand or read by `minidist simulate --file`.

# two stages, two micro-batches; F1.1 is micro-batch 1 through chunk 1
F0 F1 B0 B1
F0 B0 F1 B1
"""

import re
from typing import Literal

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Action, Schedule

_OP = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def parse_schedule(text: str, name: str = "by hand", placement: Literal["loop", "v"] = "loop") -> Schedule:
    """Read a pipeline schedule from text: a line for each stage with its actions in order, such as "F0 F1 B0 B1".

    Empty lines and comments (#) are ignored. The highest micro-batch and chunk number determine how many there are.
    name: becomes the schedule's kind, and names the text in errors. placement: of the chunks on the stages, as in
    `Schedule`. Raises UserError with the line and the word that is not an action; `check_schedule` checks whether the
    schedule can run.
    """
    lines = [(number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    orders = [[_parse_action(word, name, number) for word in words] for number, words in lines if words]
    if not orders:
        raise UserError(f"{name} has no actions: write a line for each stage, as F0 F1 B0 B1.")
    actions = [action for order in orders for action in order]
    return Schedule(
        kind=name,
        micro_batches=1 + max(action.micro_batch for action in actions),
        orders=orders,
        num_chunks=1 + max(action.chunk for action in actions),
        placement=placement,
    )


def format_schedule(schedule: Schedule) -> str:
    """Write a pipeline schedule as text that `parse_schedule` can read, a line per stage such as "F0 F1 B0 B1"."""
    return "".join(" ".join(map(str, order)) + "\n" for order in schedule.orders)


def _parse_action(word: str, name: str, line: int) -> Action:
    """Parse a word such as "W2.1". Raises UserError. name, line: of the schedule's text, for the message."""
    match = _OP.fullmatch(word)
    if not match:
        raise UserError(
            f"{name}, line {line}: {word!r} is no action; write F, B or W, the micro-batch, and the chunk if there "
            "are several: F0, B3, W2.1."
        )
    return Action(match[1], int(match[2]), int(match[3] or 0))
