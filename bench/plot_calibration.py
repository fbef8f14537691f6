"""Plot of a calibration: predicted and measured times, prediction errors, and the fastest algorithm per size."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

from minidist.tools.network.cost import MODELLED_ALGORITHMS, collective_cost, fastest_algorithm

if TYPE_CHECKING:
    from bench.calibrate_link import Calibration

NAME = "all_reduce"
COLORS = dict(zip(MODELLED_ALGORITHMS[NAME], ("#dd8452", "#4c72b0", "#55a868"), strict=True))
MAP_RANKS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def plot(calibrations: "Sequence[Calibration]", path: Path) -> None:
    """Plot three panels: times and fastest algorithms on the largest number of ranks, errors on all."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max(calibrations, key=lambda calibration: calibration.ranks)
    figure, (times, errors, fastest) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    _plot_times(largest, times)
    _plot_errors(calibrations, errors)
    _plot_fastest(largest, calibrations, fastest)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_times(calibration: "Calibration", axis) -> None:
    """Plot measured times as points, and predictions from the one link as lines."""
    ranks, sizes = calibration.ranks, calibration.sizes
    for algorithm, color in COLORS.items():
        samples = [s for s in calibration.collectives if (s.name, s.algorithm) == (NAME, algorithm)]
        axis.plot([s.num_bytes for s in samples], [s.seconds * 1e3 for s in samples], "o", color=color, markersize=4)
        predicted = [collective_cost(NAME, algorithm, ranks, n).seconds(calibration.link) * 1e3 for n in sizes]
        axis.plot(sizes, predicted, color=color, linewidth=1, label=algorithm)
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
    axis.set_title(f"{NAME}, {ranks} ranks: measured (points), predicted (lines)", loc="left", fontsize=10)
    axis.legend(fontsize=8)


def _plot_errors(calibrations: "Sequence[Calibration]", axis) -> None:
    """Plot the relative errors at held-out sizes as boxes, for both predictions."""
    values = [np.array(errors) * 100 for calibration in calibrations for errors in calibration.held_out_errors()]
    labels = [f"{c.ranks} ranks\n{source}" for c in calibrations for source in ("one link", "own link")]
    axis.boxplot(values, showfliers=False)
    axis.set_xticks(range(1, len(labels) + 1), labels, fontsize=8)
    axis.axhline(25, color="#777777", linestyle=":", linewidth=1)
    axis.set_ylabel("error at held-out sizes, %")
    axis.set_title("prediction errors (dotted: 25 %)", loc="left", fontsize=10)


def _plot_fastest(calibration: "Calibration", calibrations: "Sequence[Calibration]", axis) -> None:
    """Plot the algorithm of least predicted cost as areas, and the fastest measured one as dots.

    calibration: its link gives the predictions.
    """
    names = list(COLORS)
    sizes = [1 << k for k in range(8, 29)]
    grid = [[names.index(fastest_algorithm(NAME, p, n, calibration.link)) for n in sizes] for p in MAP_RANKS]
    colormap = matplotlib.colors.ListedColormap(list(COLORS.values()))
    axis.pcolormesh(sizes, range(len(MAP_RANKS)), grid, cmap=colormap, vmin=0, vmax=len(names) - 1, alpha=0.55)
    for measured in calibrations:
        if measured.ranks in MAP_RANKS:
            colors = [COLORS[measured.fastest_measured(n)] for n in measured.sizes]
            heights = [MAP_RANKS.index(measured.ranks)] * len(measured.sizes)
            axis.scatter(measured.sizes, heights, c=colors, edgecolors="black", s=40)
    axis.set(xscale="log", xlabel="bytes", ylabel="ranks")
    axis.set_yticks(range(len(MAP_RANKS)), MAP_RANKS, fontsize=8)
    axis.set_title("fastest algorithm: predicted (area), measured (dots)", loc="left", fontsize=10)
