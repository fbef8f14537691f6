"""The result of a cell, and its text in the notebook: by rank, equal texts of several ranks once."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minidist.comm import Record
from minidist.errors import format_ranks
from minidist.tools.notebook.rank_session import CellError

_MAX_TEXT = 10_000  # characters of one rank's output
_MAX_LINES = 200
_MAX_LIVE_LINES = 12
_MAX_LIVE_TEXT = 2_000
_MAX_FAULTS = 5
_MAX_MESSAGE_LINES = 6


@dataclass(frozen=True)
class CellResult:
    """The outcome of one notebook cell on all ranks; `str` gives the text that the notebook shows.

    kind: "done"; "error" (ranks raised); "deadlock"; "mismatch" (of collectives); "quiet" (no progress); "deadline"
    (the cell's limit); "stopped" (Ctrl-C); "flood" (too much output); "died" (ranks died).
    outputs: the text that each rank printed, by rank. shown: repr of each rank's last expression, "" for none, by rank.
    errors: one message for every distinct error, and one that explains why the cell was stopped. notes: consequences
    for the ranks, such as a restart. records: by rank, one record of the traffic meter for each communication operation
    in this cell.
    """

    kind: str
    outputs: list[str]
    shown: list[str]
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[tuple[Record, ...]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the cell ran to its end on all ranks."""
        return self.kind == "done"

    def __str__(self) -> str:
        texts = {}
        for rank, (output, shown) in enumerate(zip(self.outputs, self.shown, strict=True)):
            texts[rank] = "\n".join(part for part in (_truncate(output.rstrip("\n")), shown) if part)
        return "\n".join([*_merge_equal(texts), *self.errors, *self.notes])


def _truncate(text: str) -> str:
    """Truncate a long text."""
    lines = text.splitlines()
    if len(text) <= _MAX_TEXT and len(lines) <= _MAX_LINES:
        return text
    return "\n".join(lines[:_MAX_LINES])[:_MAX_TEXT] + f"\n... in all {len(lines)} lines, {len(text)} characters"


def format_latest_output(outputs: Sequence[str]) -> str:
    """Return the last lines that each rank has printed as one text; equal lines of several ranks are shown once.

    outputs: the text that each rank has printed, in rank order.
    """
    texts = {}
    for rank, output in enumerate(outputs):
        lines = output[-_MAX_LIVE_TEXT:].rstrip("\n").splitlines()[-_MAX_LIVE_LINES:]
        texts[rank] = "\n".join(lines)
    return "\n".join(_merge_equal(texts))


def _merge_equal(texts: Mapping[int, str]) -> list[str]:
    """Return `ranks 0-2: text` for every distinct text, by first rank; texts of several lines are indented below."""
    messages = []
    for text, ranks in _group_by_value(texts).items():
        lines = text.splitlines()
        if len(lines) == 1:
            messages.append(f"{format_ranks(ranks)}: {text}")
        elif lines:
            messages += [f"{format_ranks(ranks)}:", *(f"  {line}" for line in lines)]
    return messages


def _group_by_value(by_rank: Mapping) -> dict:
    """Return {value: ascending ranks that have it}, ordered by the first rank. by_rank: the value of each rank."""
    groups: dict = {}
    for rank, value in sorted(by_rank.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def format_errors(faults: Mapping[int, CellError]) -> list[str]:
    """Return one short message for every distinct error that a cell raised, with the ranks that raised it.

    faults: errors by rank.
    """
    messages = []
    groups = _group_by_value(faults)
    for fault, ranks in list(groups.items())[:_MAX_FAULTS]:
        first, *more = fault.message.strip().splitlines() or [""]
        more = more[:_MAX_MESSAGE_LINES] + (["..."] if len(more) > _MAX_MESSAGE_LINES else [])
        lines = [f"{format_ranks(ranks)} raised {fault.kind}" + (f": {first}" if first else "")]
        lines += [f"  {line}" for line in more]
        lines += [f"  line {fault.line} of the cell: {fault.text}"] if fault.line else []
        lines += [f"  raised at {fault.inside}"] if fault.inside else []
        messages.append("\n".join(lines))
    return messages + ([f"... and {len(groups) - _MAX_FAULTS} other errors"] if len(groups) > _MAX_FAULTS else [])


def adapt_report_to_notebook(text: str) -> str:
    """Reword a deadlock report or rank status for a notebook: "reached the end of the cell" instead of "returned"."""
    text = re.sub(r"\bcell (\S+):(\d+)", r"line \2 of cell \1", text)
    text = text.replace(" returned without", " reached the end of the cell without")
    text = text.replace("(returned)", "(reached the end of the cell)")
    return text.replace(": returned", ": reached the end of the cell")


def format_cell_lines(stacks: Mapping[int, str], ranks: Iterable[int]) -> list[str]:
    """Return lines of text that say which line of the cell each of these ranks is executing.

    stacks: the Python stack of each rank, by rank, innermost call first.
    """
    places = {}
    for rank in ranks:
        stack = stacks.get(rank, "")
        found = re.search(r'File "cell ([^"]+)", line (\d+)', stack)
        first = stack.strip().splitlines()
        places[rank] = f"line {found[2]} of cell {found[1]}" if found else first[0].strip() if first else "no answer"
    return [f"  {format_ranks(members)}: {place}" for place, members in _group_by_value(places).items()]
