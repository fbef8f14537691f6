"""Schedules as text, a line for each stage: what a person writes by hand, and what `minidist simulate --file` reads.

# two stages, two micro-batches; F1.1 is micro-batch 1 through chunk 1
F0 F1 B0 B1
F0 B0 F1 B1
"""

import re
from typing import Literal

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Op, Schedule

_OP = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def parse_schedule(text: str, name: str = "by hand", placement: Literal["loop", "v"] = "loop") -> Schedule:
    """The schedule that a text holds; lines that are empty or begin with # are passed over.

    The highest micro-batch and chunk that appear say how many there are. Whether it can run says `check`.
    Raises UserError with the line and the word that is no operation.
    """
    lines = [(number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    orders = [[_op(word, name, number) for word in words] for number, words in lines if words]
    if not orders:
        raise UserError(f"{name} has no operations: write a line for each stage, as F0 F1 B0 B1.")
    ops = [op for order in orders for op in order]
    return Schedule(
        kind=name,
        micro_batches=1 + max(op.micro_batch for op in ops),
        orders=orders,
        chunks=1 + max(op.chunk for op in ops),
        placement=placement,
    )


def format_schedule(schedule: Schedule) -> str:
    """The text of a schedule, which `parse_schedule` understands."""
    return "".join(" ".join(map(str, order)) + "\n" for order in schedule.orders)


def _op(word: str, name: str, line: int) -> Op:
    found = _OP.fullmatch(word)
    if not found:
        raise UserError(
            f"{name}, line {line}: {word!r} is no operation; write F, B or W, the micro-batch, and the chunk if there "
            "are several: F0, B3, W2.1."
        )
    return Op(found[1], int(found[2]), int(found[3] or 0))
