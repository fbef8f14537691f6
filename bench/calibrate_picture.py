"""The picture of a calibration: predictions beside measurements, how far off they are, and who wins where."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

from minidist.comm.cost import collective_cost, fastest_algorithm
from minidist.comm.wire_bytes import IMPLEMENTED_ALGORITHMS

if TYPE_CHECKING:
    from bench.calibrate import Calibration

NAME = "all_reduce"
COLORS = dict(zip(IMPLEMENTED_ALGORITHMS[NAME], ("#8c8c8c", "#dd8452", "#4c72b0", "#55a868", "#c44e52"), strict=True))
MAP_RANKS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def draw(found: "Sequence[Calibration]", path: Path) -> None:
    """Three panels, the first and the last of the largest number of ranks."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max(found, key=lambda one: one.ranks)
    figure, (times, off, winners) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    _draw_times(largest, times)
    _draw_errors(found, off)
    _draw_winners(largest, found, winners)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_times(found: "Calibration", axis) -> None:
    """Points: measured; lines: predicted from the link, before the algorithm ever ran."""
    for algorithm, color in COLORS.items():
        samples = [s for s in found.operations if (s.name, s.algorithm) == (NAME, algorithm)]
        axis.plot([s.bytes for s in samples], [s.seconds * 1e3 for s in samples], "o", color=color, markersize=4)
        predicted = [collective_cost(NAME, algorithm, found.ranks, n).seconds(found.link) * 1e3 for n in found.sizes]
        axis.plot(found.sizes, predicted, color=color, linewidth=1, label=algorithm)
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
    axis.set_title(f"{NAME}, {found.ranks} ranks: points measured, lines from the link", loc="left", fontsize=10)
    axis.legend(fontsize=8)


def _draw_errors(found: "Sequence[Calibration]", axis) -> None:
    """Predicted over measured of every held-out size, by both ways to predict."""
    values = [np.array(errors) * 100 for one in found for errors in one.errors_of()]
    labels = [f"{one.ranks} ranks\n{way}" for one in found for way in ("from link", "own fit")]
    axis.boxplot(values, showfliers=False)
    axis.set_xticks(range(1, len(labels) + 1), labels, fontsize=8)
    axis.axhline(25, color="#777777", linestyle=":", linewidth=1)
    axis.set_ylabel("error at held-out sizes, %")
    axis.set_title("how far predictions are off (dotted: 25 %)", loc="left", fontsize=10)


def _draw_winners(link_from: "Calibration", found: "Sequence[Calibration]", axis) -> None:
    """Colour: the algorithm of least computed cost; a ring of another colour: what was measured fastest."""
    names = list(COLORS)
    sizes = [1 << k for k in range(8, 29)]
    grid = [[names.index(fastest_algorithm(NAME, p, n, link_from.link)) for n in sizes] for p in MAP_RANKS]
    shades = matplotlib.colors.ListedColormap(list(COLORS.values()))
    axis.pcolormesh(sizes, range(len(MAP_RANKS)), grid, cmap=shades, vmin=0, vmax=len(names) - 1, alpha=0.55)
    for one in found:
        if one.ranks in MAP_RANKS:
            measured = [COLORS[one.winner(n)] for n in one.sizes]
            at = [MAP_RANKS.index(one.ranks)] * len(one.sizes)
            axis.scatter(one.sizes, at, c=measured, edgecolors="black", s=40)
    axis.set(xscale="log", xlabel="bytes", ylabel="ranks")
    axis.set_yticks(range(len(MAP_RANKS)), MAP_RANKS, fontsize=8)
    axis.set_title("least computed cost (area), measured fastest (dots)", loc="left", fontsize=10)
