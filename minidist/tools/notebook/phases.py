"""Plots of runs with failures: what happens when, what a killed save leaves, and who reads which part of a checkpoint.

Each function draws unless `draw` is False, and returns its data; empty data is an error, as in `pictures.py`.
"""

from collections.abc import Iterable, Mapping, Sequence

from minidist.errors import UserError, format_count
from minidist.parameters import Box
from minidist.tools.consistency.clock import COMPUTING, LINK_BUSY, MESSAGE, WAITING
from minidist.tools.simulate.failures import LOST, RESTART, SAVING, USEFUL, Phase, time_by_kind

_COLORS = {
    **{USEFUL: "C0", SAVING: "C1", LOST: "C3", RESTART: "0.55"},
    **{COMPUTING: "C0", MESSAGE: "C1", WAITING: "0.85", LINK_BUSY: "0.6"},
    # The parts of a training step, which have the same colour in every figure.
    **{"forward": "C2", "backward": "C4", "update": "C5", "all-reduce": "C6", "reduce-scatter": "C8"},
    **{"all-gather": "C9", "all-gather in flight": "C9", "gathered": "#9edae5"},
}
_FURTHER_COLORS = ("C2", "C4", "C5", "C6", "C8", "C9")


def plot_phases(
    rows: Mapping[str, Iterable[Phase]], x: str = "seconds", draw: bool = True
) -> dict[str, dict[str, float]]:
    """Plot the phases of runs, ranks or threads as bars on a common time axis; return the time in each kind of phase.

    rows: the phases of each row, by the row's name; phases of one kind have one colour. x: label of the time axis, with
    the unit of the phases' times. draw: whether to draw at all. Returns {row: {kind of phase: total time}}. Raises
    UserError when there is no row, or a row is empty.
    """
    phases = {name: list(row) for name, row in rows.items()}
    empty = [name for name, row in phases.items() if not row]
    if not phases or empty:
        raise UserError(f"there are no phases to draw: {' and '.join(empty) or 'no row'} has none")
    if draw:
        _draw_phases(phases, x)
    return {name: time_by_kind(row) for name, row in phases.items()}


def plot_outcomes(
    rows: Mapping[str, Sequence[str]],
    columns: Sequence[object],
    x: str,
    colors: Mapping[str, str] | None = None,
    draw: bool = True,
) -> dict[str, list[str]]:
    """Plot a table of outcomes, such as "ok" or "lost", as a grid with one colour per outcome; return the rows.

    rows: by the row's name, its outcomes, one for each of `columns`. x: label of the axis of columns. colors:
    matplotlib's colours by outcome, in the order of the legend; if None, the outcomes get colours in order of first
    occurrence. Raises UserError when there is no row or no column, or a row does not have one outcome for each column.
    """
    grid = {name: list(row) for name, row in rows.items()}
    if not grid or not columns:
        raise UserError("there is nothing to draw: no row, or no column")
    if odd := [name for name, row in grid.items() if len(row) != len(columns)]:
        raise UserError(f"{len(columns)} columns, but the row {odd[0]} has {len(grid[odd[0]])} outcomes")
    if draw:
        _draw_outcomes(grid, columns, x, colors or _colors_by_occurrence(grid))
    return grid


def plot_resharding(saved: Sequence[Box], loading: Sequence[Box], draw: bool = True) -> list[tuple[int, int, Box]]:
    """Plot how a matrix is sharded in a checkpoint, and which parts of it each rank loads from which saving rank.

    saved: the box of the matrix (its index range in each dimension) that each saving rank has written, in rank order.
    loading: the box of each loading rank. Both plots have one colour per saving rank. Returns (loading rank, saving
    rank, box) for every box that a loading rank reads. Raises UserError if a box does not have two dimensions, or no
    rank reads anything.
    """
    reads = [
        (reader, writer, overlap)
        for reader, box in enumerate(loading)
        for writer, source in enumerate(saved)
        if (overlap := source.intersect(box))
    ]
    if not reads or any(len(box.shape) != 2 for box in (*saved, *loading)):
        raise UserError(f"there is nothing to draw: {len(reads)} boxes are read, and only those of a matrix are drawn")
    if draw:
        _draw_resharding(saved, loading, reads)
    return reads


def _draw_phases(rows: Mapping[str, list[Phase]], x: str) -> None:
    from matplotlib import pyplot as plt

    occurring = dict.fromkeys(phase.kind for row in rows.values() for phase in row)
    kinds = sorted(occurring, key=lambda kind: [*_COLORS, kind].index(kind))
    further = (color for color in _FURTHER_COLORS if color not in map(_COLORS.get, kinds))
    colors = {kind: _COLORS.get(kind) or next(further) for kind in kinds}
    figure, axes = plt.subplots(figsize=(8, 1 + 0.45 * len(rows)))
    for at, row in enumerate(rows.values()):
        for kind in kinds:
            spans = [(phase.start, phase.stop - phase.start) for phase in row if phase.kind == kind]
            axes.broken_barh(spans, (at - 0.35, 0.7), facecolors=colors[kind], label=kind)
    axes.set(xlabel=x, yticks=range(len(rows)), xlim=(0, max(row[-1].stop for row in rows.values())))
    axes.set_yticklabels(rows)
    axes.invert_yaxis()
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()


def _colors_by_occurrence(grid: Mapping[str, list[str]]) -> dict[str, str]:
    """Return a matplotlib colour for each outcome, in the order of first occurrence."""
    outcomes = dict.fromkeys(outcome for row in grid.values() for outcome in row)
    return {outcome: f"C{number}" for number, outcome in enumerate(outcomes)}


def _draw_outcomes(grid: Mapping[str, list[str]], columns: Sequence[object], x: str, colors: Mapping[str, str]) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.35 * len(grid)))
    for at, row in enumerate(grid.values()):
        for column, outcome in enumerate(row):
            axes.broken_barh([(column - 0.47, 0.94)], (at - 0.42, 0.84), facecolors=colors[outcome])
    axes.set(xlabel=x, xticks=range(len(columns)), yticks=range(len(grid)), xlim=(-0.6, len(columns) - 0.4))
    axes.set_xticklabels([str(column) for column in columns], fontsize=8)
    axes.set_yticklabels(grid)
    axes.invert_yaxis()
    patches = [Patch(color=color, label=outcome) for outcome, color in colors.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()


def _draw_resharding(saved: Sequence[Box], loading: Sequence[Box], reads: list[tuple[int, int, Box]]) -> None:
    from matplotlib import pyplot as plt

    rows, columns = (max(box.stop[dimension] for box in saved) for dimension in (0, 1))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    for axes, title in (
        (left, f"saved by {format_count(len(saved), 'rank')}"),
        (right, f"loaded by {format_count(len(loading), 'rank')}"),
    ):
        axes.set(xlim=(0, columns), ylim=(rows, 0), title=title, xlabel="column", ylabel="row")
    for rank, box in enumerate(saved):
        _draw_box(left, box, f"C{rank}", f"rank {rank}")
    for reader, writer, box in reads:
        _draw_box(right, box, f"C{writer}", f"{writer} to {reader}")
    for box in loading:
        _draw_box(right, box, None)
    figure.tight_layout()


def _draw_box(axes, box: Box, color: str | None, text: str = "") -> None:
    """Draw a box with a text in it; without a colour, its thick outline only."""
    from matplotlib.patches import Rectangle

    (top, left), (height, width) = box.start, box.shape
    style = {"fill": False, "linewidth": 3} if color is None else {"facecolor": color, "alpha": 0.55, "linewidth": 0.5}
    axes.add_patch(Rectangle((left, top), width, height, edgecolor="black", **style))
    axes.text(left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=8)
