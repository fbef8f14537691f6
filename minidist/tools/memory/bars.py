"""Bars of memory, side by side for every rank. Who draws brings the axes: a run its own, a notebook the reader's."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOMY = 10  # bars: with more of them numbers stand upright above, and none inside


def bytes_text(count: float) -> str:
    """A count of bytes for people: 1.5 kB. Decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:g} B"


def figure_size(ranks: int, bars: int) -> tuple[float, float]:
    """Inches in which so many bars for each of so many ranks can be read."""
    return min(2.5 + 0.9 * ranks * bars, 14.0), 3.2 if ranks * bars <= _ROOMY else 4.5


def draw_bars(axes: "Axes", bars: Mapping[str, Sequence[Mapping[str, int]]]) -> None:
    """Draw them on `axes`, with a legend to the right of it.

    bars: name to the bytes by part of every rank, in rank order; of each rank the bars stand side by side, those of the
    second name hatched. A part has one colour.
    """
    ranks, width = len(next(iter(bars.values()))), 0.7 / len(bars)
    roomy = ranks * len(bars) <= _ROOMY
    labels = list(dict.fromkeys(label for held in bars.values() for parts in held for label in parts))
    highest = max(sum(parts.values()) for held in bars.values() for parts in held)
    for number, (name, held) in enumerate(bars.items()):
        places = [rank + (number - (len(bars) - 1) / 2) * width for rank in range(ranks)]
        below = [0] * ranks
        for color, label in enumerate(labels):
            counts = [parts.get(label, 0) for parts in held]
            look = {"color": f"C{color}", "label": label if number == 0 else None}
            if number:
                look |= {"hatch": "//", "edgecolor": "white", "alpha": 0.4}
            drawn = axes.bar(places, counts, width, bottom=below, **look)
            inside = [bytes_text(count) if roomy and count > highest / 12 else "" for count in counts]
            axes.bar_label(drawn, inside, label_type="center", color="black" if number else "white", fontsize=8)
            below = [low + count for low, count in zip(below, counts, strict=True)]
        for place, total in zip(places, below, strict=True):
            text = ("\n" if roomy else " ").join(filter(None, (name, bytes_text(total))))
            upright = {} if roomy else {"rotation": 90}
            axes.annotate(text, (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=8, **upright)
    above = 0.1 * len(bars) if roomy else 0.55
    axes.set(xlabel="rank", xticks=range(ranks), title="memory held", ylim=(0, (1 + above) * highest))
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.yaxis.set_major_formatter(lambda value, _: bytes_text(value))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
