"""Plots of predicted and measured curves, and of the best choice by size and number of ranks.

Each function draws unless `draw` is False, and returns its data; empty data is an error, as in `pictures.py`.
"""

import math
from collections.abc import Mapping, Sequence

from minidist.errors import UserError
from minidist.tools.memory.bars import format_bytes

Points = Sequence[tuple[float, float]]


def compare_curves(
    predicted: Mapping[str, Points],
    measured: Mapping[str, Points] | None = None,
    *,
    y: str = "ms",
    x: str = "bytes",
    level: float | None = None,
    draw: bool = True,
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Plot predicted curves as lines and measured ones as dots, on logarithmic axes, with one colour per name.

    predicted, measured: (x, y) points by name, all above 0. y, x: axis labels with units; an x label that begins with
    "bytes" makes the numbers on that axis "10 kB", "1 MB". level: y of a horizontal dotted line, None for none. Returns
    {"predicted": ..., "measured": ...}. Raises UserError when there is nothing to draw, a curve is empty, or a number
    is not above 0 and finite.
    """
    drawn = {
        "predicted": {name: [(float(a), float(b)) for a, b in points] for name, points in predicted.items()},
        "measured": {name: [(float(a), float(b)) for a, b in points] for name, points in (measured or {}).items()},
    }
    every = [(name, points) for kind in drawn.values() for name, points in kind.items()]
    empty = [name for name, points in every if not points]
    if not every or empty:
        raise UserError(f"there is nothing to draw: {' and '.join(empty) or 'no curve'} has no points")
    if odd := {name for name, points in every if not all(0 < n < math.inf for point in points for n in point)}:
        raise UserError(f"the points of {' and '.join(sorted(odd))} are not all above 0: a logarithm would drop them")
    if draw:
        _draw_curves(drawn, y, x, level)
    return drawn


def plot_winners(
    best: Mapping[int, Sequence[str]],
    sizes: Sequence[int],
    dots: Mapping[int, Sequence[tuple[int, str]]] | None = None,
    *,
    names: Sequence[str] = (),
    draw: bool = True,
) -> dict[int, list[str]]:
    """Plot which name (such as an algorithm) is best for each number of ranks and each size, as a coloured grid.

    best: by number of ranks, the best name for each of `sizes`. sizes: in bytes. dots: by number of ranks, (bytes,
    name) of further points, drawn as dots. names: names in the order of their colours, as in a `compare_curves` plot of
    the same names. Returns the best names by number of ranks. Raises UserError when there is no number of ranks or no
    size, or `best` does not have one name for each size.
    """
    rows = {ranks: list(names) for ranks, names in best.items()}
    if not rows or not sizes:
        raise UserError("there is nothing to draw: no number of ranks, or no size")
    if odd := [ranks for ranks, names in rows.items() if len(names) != len(sizes)]:
        raise UserError(f"{len(sizes)} sizes, but the row of {odd[0]} ranks has {len(rows[odd[0]])} names")
    if draw:
        _draw_winners(rows, sizes, dots or {}, names)
    return rows


def _draw_curves(drawn: Mapping[str, Mapping[str, Points]], y: str, x: str, level: float | None) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(7, 3.8))
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys([*drawn["predicted"], *drawn["measured"]]))}
    for name, points in drawn["predicted"].items():
        axes.plot(*zip(*points, strict=True), color=colors[name], linewidth=1.2, label=name)
    for name, points in drawn["measured"].items():
        alone = name if name not in drawn["predicted"] else None
        axes.plot(*zip(*points, strict=True), "o", color=colors[name], markersize=5, label=alone)
    if level is not None:
        axes.axhline(level, color="0.6", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    if x.startswith("bytes"):
        axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()


def _draw_winners(rows: Mapping[int, Sequence[str]], sizes: Sequence[int], dots: Mapping, order: Sequence[str]) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = list(dict.fromkeys([*order, *(name for row in rows.values() for name in row)]))
    names += sorted({name for points in dots.values() for _, name in points} - {*names})
    numbers = [[names.index(name) for name in row] for row in rows.values()]
    shades = ListedColormap([f"C{i}" for i in range(len(names))])
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.28 * len(rows)))
    places = range(len(rows))
    axes.pcolormesh(sizes, places, numbers, cmap=shades, vmin=-0.5, vmax=len(names) - 0.5, alpha=0.6, shading="nearest")
    for ranks, points in dots.items():
        at = [(size, list(rows).index(ranks), f"C{names.index(name)}") for size, name in points]
        x, y, color = zip(*at, strict=True)
        axes.scatter(x, y, c=color, edgecolors="black", s=45, zorder=3)
    axes.set(xscale="log", xlabel="bytes", ylabel="ranks", yticks=places)
    axes.set_yticklabels(rows)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    patches = [Patch(color=f"C{i}", alpha=0.6, label=name) for i, name in enumerate(names)]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
