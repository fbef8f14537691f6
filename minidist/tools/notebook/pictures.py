"""Plots of measured communication: the traffic matrix and the timeline of events.

The data are records of the traffic meter, which writes one record per communication operation with its bytes. Each plot
function draws into the notebook unless `draw` is False, and returns the data that it draws. Empty data is an error,
because an empty plot misleads.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minidist.comm import Record
from minidist.errors import UserError
from minidist.tools.memory.bars import format_bytes
from minidist.tools.notebook.result import CellResult
from minidist.tools.trace import intervals
from minidist.tools.trace.traffic import traffic_matrix

Measured = CellResult | Sequence[Iterable[Record]]


class Span(NamedTuple):
    """A communication operation of one rank, as `plot_timeline` draws it, from launch to wait.

    name: the operation's name, such as "all_reduce". launched, waited: positions of its launch and of the end of its
    wait in the rank's order of events; waited is None without a wait. wire_bytes: the bytes that this rank sent.
    """

    name: str
    launched: int
    waited: int | None
    wire_bytes: int


def plot_traffic(measured: Measured, draw: bool = True) -> list[list[int]]:
    """Plot the bytes that each rank sent to each other rank as a matrix; return it as lists, one row per sender.

    measured: a cell's result (`LiveRanks.last`), or the traffic meter's records of every rank. Sends are counted;
    collectives are modelled by the algorithm that the meter names (`Record.algorithm`). Raises UserError when nothing
    was sent.
    """
    matrix = traffic_matrix(_records_by_rank(measured))
    if not any(map(any, matrix)):
        raise UserError("there is no traffic to draw: no rank sent anything to another")
    if draw:
        _draw_matrix(matrix)
    return matrix


Marks = Sequence[Iterable[tuple[int, str]]]


def plot_timeline(measured: Measured, marks: Marks = (), draw: bool = True) -> list[list[Span]]:
    """Plot each rank's communication operations as bars from launch to wait; return them, by rank.

    The axis counts the rank's events (launches, ends of waits, marks), not seconds. measured: a cell's result
    (`LiveRanks.last`), or the traffic meter's records of every rank. marks: for each rank, labels to draw as (position
    in the order of events, label), such as `Meter.events`. Raises UserError when there was no operation.
    """
    records = _records_by_rank(measured)
    marks = [list(rows) for rows in marks] or [[] for _ in records]
    first = [
        min([*(r.launched for r in rows), *(at for at, _ in marked)], default=0)
        for rows, marked in zip(records, marks, strict=True)
    ]
    spans = [
        [
            Span(r.name, r.launched - first[rank], r.waited and r.waited - first[rank], r.wire_bytes)
            for r in sorted(rows, key=lambda r: r.launched)
        ]
        for rank, rows in enumerate(records)
    ]
    if not any(spans):
        raise UserError("there is nothing to draw: no rank began an operation")
    if draw:
        _draw_spans(spans, [[(at - first[n], label) for at, label in rows] for n, rows in enumerate(marks)])
    return spans


def assign_lanes(spans: Sequence[Span]) -> list[int]:
    """Return a lane (a row of the plot, from 0) for each operation, so that operations of one lane do not overlap.

    spans: the operations of one rank, in launch order. Operations overlap if they are in flight at the same time.
    """
    return intervals.assign_lanes([(span.launched, _bar_end(span)) for span in spans])


def _bar_end(span: Span) -> float:
    """Return the position at which the bar of an operation ends."""
    return span.launched + 0.9 if span.waited is None else max(span.waited, span.launched + 0.3)


def _records_by_rank(measured: Measured) -> list[list[Record]]:
    """Return the traffic meter's records as a list per rank."""
    return [list(rows) for rows in (measured.records if isinstance(measured, CellResult) else measured)]


def _draw_matrix(matrix: list[list[int]]) -> None:
    from matplotlib import pyplot as plt

    size = len(matrix)
    figure, axes = plt.subplots(figsize=(1.6 + 0.8 * size, 1.2 + 0.7 * size))
    axes.imshow(matrix, cmap="Blues")
    high = max(map(max, matrix))
    for sender, row in enumerate(matrix):
        for receiver, count in enumerate(row):
            if count:
                color = "white" if count > high / 2 else "black"
                axes.text(receiver, sender, format_bytes(count), ha="center", va="center", color=color, fontsize=8)
    axes.set(xlabel="to rank", ylabel="from rank", xticks=range(size), yticks=range(size), title="bytes sent")
    figure.tight_layout()


def _draw_spans(spans: list[list[Span]], marks: list[list[tuple[int, str]]]) -> None:
    from matplotlib import pyplot as plt

    placed = [assign_lanes(rows) for rows in spans]
    height = 0.8 / (1 + max(max(rows, default=0) for rows in placed))
    figure, axes = plt.subplots(figsize=(8, 1 + len(spans) * max(0.6, 0.12 / height)))
    colors = {name: f"C{i}" for i, name in enumerate(sorted({span.name for rows in spans for span in rows}))}
    for rank, rows in enumerate(spans):
        for span, lane in zip(rows, placed[rank], strict=True):
            axes.broken_barh(
                [(span.launched, _bar_end(span) - span.launched)], (rank - 0.4 + lane * height, 0.9 * height),
                facecolors=colors[span.name], label=span.name,
            )  # fmt: skip
    for i, label in enumerate(sorted({label for rows in marks for _, label in rows})):
        at = [(place, rank) for rank, rows in enumerate(marks) for place, other in rows if other == label]
        axes.plot(*zip(*at, strict=True), "|x+1."[i % 5], color="black", markersize=14, label=label)
    axes.set(xlabel="order of events on each rank", ylabel="rank", yticks=range(len(spans)))
    axes.invert_yaxis()
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
