"""Stacked bar charts of memory per rank, drawn on matplotlib axes that the caller provides."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOMY = 10  # bars; with more, totals are written vertically and the parts of a bar have no numbers


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as "1.5 kB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:g} B"


def bar_figure_size(num_ranks: int, num_bars: int) -> tuple[float, float]:
    """Return the (width, height) in inches of a figure that shows `num_bars` bars for each of `num_ranks` ranks."""
    return min(2.5 + 0.9 * num_ranks * num_bars, 14.0), 3.2 if num_ranks * num_bars <= _ROOMY else 4.5


def draw_memory_bars(axes: "Axes", bars: Mapping[str, Sequence[Mapping[str, int]]]) -> None:
    """Draw stacked bars of memory on `axes`, one group of bars per rank, with a legend to the right.

    bars: by name, such as "measured", the memory of every rank, in rank order, as {kind of tensor: bytes}. The bars of
    a rank stand side by side; those of the second name are hatched. Each kind has one colour.
    """
    ranks, width = len(next(iter(bars.values()))), 0.7 / len(bars)
    roomy = ranks * len(bars) <= _ROOMY
    labels = list(dict.fromkeys(label for by_rank in bars.values() for breakdown in by_rank for label in breakdown))
    highest = max(sum(breakdown.values()) for by_rank in bars.values() for breakdown in by_rank)
    for number, (name, by_rank) in enumerate(bars.items()):
        positions = [rank + (number - (len(bars) - 1) / 2) * width for rank in range(ranks)]
        below = [0] * ranks
        for color, label in enumerate(labels):
            counts = [breakdown.get(label, 0) for breakdown in by_rank]
            style = {"color": f"C{color}", "label": label if number == 0 else None}
            if number:
                style |= {"hatch": "//", "edgecolor": "white", "alpha": 0.4}
            drawn = axes.bar(positions, counts, width, bottom=below, **style)
            numbers = [format_bytes(count) if roomy and count > highest / 12 else "" for count in counts]
            axes.bar_label(drawn, numbers, label_type="center", color="black" if number else "white", fontsize=8)
            below = [low + count for low, count in zip(below, counts, strict=True)]
        for position, total in zip(positions, below, strict=True):
            text = ("\n" if roomy else " ").join(filter(None, (name, format_bytes(total))))
            upright = {} if roomy else {"rotation": 90}
            axes.annotate(
                text, (position, total), (0, 2), textcoords="offset points", ha="center", fontsize=8, **upright
            )
    above = 0.1 * len(bars) if roomy else 0.55
    axes.set(xlabel="rank", xticks=range(ranks), title="memory held", ylim=(0, (1 + above) * highest))
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
