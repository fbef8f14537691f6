"""Diagrams of ideas: who holds what (`plot_cells`), and what moves where in which round (`plot_transfers`).

One visual language for the whole course: a colour per rank, and a cell for a tensor or a chunk of one. A cell has the
colour of the rank whose values it contains; the sum over several ranks has a stripe in each one's colour. Hatching
means partial, still to be summed; a dashed outline means transient, freed before the step is over. Each function draws
unless `draw` is False, and returns the data that it draws; empty data is an error, because an empty diagram misleads.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minidist.comm import Record
from minidist.errors import UserError

KINDS = ("full", "partial", "transient")
_LIGHTEN = 0.45  # how far a rank's colour is mixed with white, so that black text is readable on it


class Cell(NamedTuple):
    """A tensor, or a chunk of one, on one rank.

    text: its label. ranks: whose values it contains; several if it is their sum; () for something without values of any
    rank, such as an empty buffer or a replica that is equal everywhere, drawn in grey. kind: one of `KINDS`. width:
    relative to other cells of its panel.
    """

    text: str = ""
    ranks: tuple[int, ...] = ()
    kind: str = "full"
    width: float = 1.0


class Transfer(NamedTuple):
    """A message from one rank to another. label: of its contents, such as "chunk 2"."""

    source: int
    target: int
    label: str = ""


Rows = Sequence[Sequence[Cell | None]]  # one row per rank; None leaves a place empty


def plot_cells(
    panels: Mapping[str, Rows],
    columns: Sequence[str] = (),
    rows: Sequence[str] | None = None,
    draw: bool = True,
) -> dict[str, list[list[Cell | None]]]:
    """Draw who holds what: a panel per moment or method, with a row of cells for each rank; return the cells.

    panels: the rows of each panel, by its title. columns: names of the columns, the same for all panels. rows: names of
    the rows; "rank 0", "rank 1", ... if None. Raises UserError if there is nothing to draw, or a kind is unknown.
    """
    drawn = {title: [list(row) for row in each] for title, each in panels.items()}
    cells = [cell for each in drawn.values() for row in each for cell in row if cell is not None]
    if not cells:
        raise UserError("there are no cells to draw: " + ("no panel" if not drawn else "all places are empty"))
    if unknown := sorted({cell.kind for cell in cells} - set(KINDS)):
        raise UserError(f"a cell is of the kind {unknown[0]!r}; possible are {', '.join(KINDS)}")
    if draw:
        _draw_panels(drawn, columns, rows)
    return drawn


def contributions(values: Sequence[Sequence[float]]) -> list[list[Cell]]:
    """Return a cell for each value, with the ranks that contributed to it; for the rows of `plot_cells`.

    values: by rank, the elements of its tensor after a collective in which each rank r started with 2**r (or 0). So the
    binary digits of a value say whose numbers were added: 5 = 1 + 4 is the sum of ranks 0 and 2.
    """
    ranks = [[tuple(r for r in range(64) if int(value) >> r & 1) for value in row] for row in values]
    return [[Cell("+".join(map(str, each)), each) for each in row] for row in ranks]


def plot_transfers(
    rounds: Sequence[Sequence[Transfer]], num_ranks: int, title: str = "", draw: bool = True
) -> list[list[Transfer]]:
    """Draw what moves where: a column per rank, a line per round, an arrow per message; return the transfers.

    rounds: the messages of each round, which are sent at the same time. An arrow has its sender's colour. Raises
    UserError if no message is sent, or one goes to a rank that does not exist.
    """
    drawn = [list(each) for each in rounds]
    if not any(drawn):
        raise UserError("there are no transfers to draw")
    for transfer in (one for each in drawn for one in each):
        if not (0 <= transfer.source < num_ranks and 0 <= transfer.target < num_ranks):
            raise UserError(f"{transfer} is not between two of {num_ranks} ranks")
    if draw:
        _draw_rounds(drawn, num_ranks, title)
    return drawn


def rank_color(rank: int) -> tuple[float, float, float]:
    """Return the colour of a rank in all diagrams, as red, green and blue between 0 and 1."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(f"C{rank % 10}")
    return tuple(part + (1 - part) * _LIGHTEN for part in (red, green, blue))


def _draw_panels(
    panels: Mapping[str, list[list[Cell | None]]], columns: Sequence[str], names: Sequence[str] | None
) -> None:
    from matplotlib import pyplot as plt

    widths = [max(sum(1.0 if c is None else c.width for c in row) for row in rows) for rows in panels.values()]
    height = max(map(len, panels.values()))
    figure, all_axes = plt.subplots(
        1,
        len(panels),
        figsize=(min(11.0, 1.1 + 0.95 * sum(widths) + 0.3 * len(panels)), 0.9 + 0.42 * height),
        width_ratios=widths,
        squeeze=False,
    )
    for axes, (title, rows), width in zip(all_axes[0], panels.items(), widths, strict=True):
        for at, row in enumerate(rows):
            left = 0.0
            for cell in row:
                if cell is not None:
                    _draw_cell(axes, left, at, cell)
                left += 1.0 if cell is None else cell.width
        axes.set(xlim=(-0.05, width + 0.05), ylim=(len(rows) - 0.45, -0.55), yticks=range(len(rows)))
        axes.set_title(title, fontsize=10)
        is_first = axes is all_axes[0][0]
        axes.set_yticklabels(names or [f"rank {at}" for at in range(len(rows))] if is_first else [""] * len(rows))
        axes.set_xticks([at + 0.5 for at in range(len(columns))], columns, fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.tight_layout()


def _draw_cell(axes, left: float, row: int, cell: Cell) -> None:
    """Draw a cell of `axes` whose left edge is at `left`, with a stripe per rank."""
    from matplotlib.patches import Rectangle

    colors = [rank_color(rank) for rank in cell.ranks] or [(0.88, 0.88, 0.88)]
    x, width, top = left + 0.04, cell.width - 0.08, row - 0.4
    for at, color in enumerate(colors):
        stripe = width / len(colors)
        axes.add_patch(Rectangle((x + at * stripe, top), stripe, 0.8, facecolor=color, edgecolor="none"))
    axes.add_patch(
        Rectangle(
            (x, top),
            width,
            0.8,
            fill=False,
            edgecolor="0.25",
            linewidth=1.0,
            linestyle="--" if cell.kind == "transient" else "-",
            hatch="///" if cell.kind == "partial" else None,
        )
    )
    text = axes.text(left + cell.width / 2, row, cell.text, ha="center", va="center", fontsize=8)
    if cell.kind == "partial":
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8})


def _draw_rounds(rounds: list[list[Transfer]], num_ranks: int, title: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(min(11.0, 2.0 + 1.15 * num_ranks), 0.9 + 0.6 * len(rounds)))
    for rank in range(num_ranks):
        axes.axvline(rank, color=rank_color(rank), linewidth=3, zorder=0)
    for at, transfers in enumerate(rounds):
        for number, (source, target, label) in enumerate(transfers):
            y = at + 0.7 * ((number + 0.5) / len(transfers) - 0.5)  # side by side, so that no arrow hides another
            arrow = {"arrowstyle": "-|>", "color": rank_color(source), "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=(target, y), xytext=(source, y), arrowprops=arrow)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axes.text(
                (source + target) / 2, y, label, ha="center", va="center", fontsize=7, bbox=box if label else None
            )
    axes.set(xlim=(-0.4, num_ranks - 0.6), ylim=(len(rounds) - 0.4, -0.6), title=title, ylabel="round")
    axes.set_xticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.set_yticks(range(len(rounds)), range(1, len(rounds) + 1))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.tight_layout()


def transfers_by_round(records_by_rank: Sequence[Iterable[Record]]) -> list[list[Transfer]]:
    """Return the sends among the records by round, for `plot_transfers`: a round is what could be sent at one time.

    records_by_rank: for every rank, in rank order, the records of its traffic meter, such as `CellResult.records`;
    collectives are left out. A rank starts its next send or receive, or the next batch of them, when the previous one
    has ended. Labels are numbers of elements. Raises UserError if a send or a receive has no counterpart.
    """
    waiting = [_group_into_batches(records) for records in records_by_rank]
    rounds = []
    while any(waiting):
        ready = {rank: batches[0] for rank, batches in enumerate(waiting) if batches}
        while unmatched := [rank for rank in ready if not _has_all_counterparts(rank, ready)]:
            ready = {rank: batch for rank, batch in ready.items() if rank not in unmatched}
        if not ready:
            ranks = [rank for rank, batches in enumerate(waiting) if batches]
            raise UserError(f"the sends and receives of ranks {ranks} do not match: records of all ranks are needed")
        rounds.append(
            [
                Transfer(rank, record.peer, str(math.prod(record.shape)))
                for rank, batch in ready.items()
                for record in batch
                if record.name == "send"
            ]
        )
        for rank in ready:
            waiting[rank].pop(0)
    return rounds


def _group_into_batches(records: Iterable[Record]) -> list[list[Record]]:
    """Return the sends and receives of one rank, in one list those that were launched before any of them had ended."""
    batches: list[list[Record]] = []
    for record in records:
        if record.name in ("send", "recv"):
            if batches and all(each.waited is None or record.launched < each.waited for each in batches[-1]):
                batches[-1].append(record)
            else:
                batches.append([record])
    return batches


def _has_all_counterparts(rank: int, ready: Mapping[int, Sequence[Record]]) -> bool:
    """Whether each send of the rank's batch has a receive in the batch of its peer, and each receive a send."""
    opposite = {"send": "recv", "recv": "send"}
    return all(
        any(other.name == opposite[record.name] and other.peer == rank for other in ready.get(record.peer, ()))
        for record in ready[rank]
    )
