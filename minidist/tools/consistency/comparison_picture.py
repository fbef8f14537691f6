"""The picture of `minidist consistency`: loss against bytes, time on the virtual clock, drift, and staleness."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from minidist.tools.consistency.clock import COMPUTING, LINK_BUSY, MESSAGE, WAITING
from minidist.tools.consistency.comparison import Measurement, end_of_phases, mean_seconds_in_phase

_COLORS = {COMPUTING: "C0", MESSAGE: "C1", WAITING: "0.75", LINK_BUSY: "0.5"}


def draw_comparison(measurements: Sequence[Measurement]) -> Figure:
    """Draw the measurements of some modes in four charts; each mode has one colour, a row of bars and a name."""
    figure = Figure(figsize=(11, 4 + 0.5 * len(measurements)), dpi=150, layout="constrained")
    losses, times, drifts, staleness = figure.subplots(2, 2).flat
    _draw_losses(losses, measurements)
    _draw_times(times, measurements)
    _draw_drifts(drifts, measurements)
    _draw_staleness(staleness, measurements)
    return figure


def _draw_losses(axes: Axes, measurements: Sequence[Measurement]) -> None:
    for number, found in enumerate(measurements):
        mean, sent = statistics.mean(found.held_out_losses), max(found.sent_bytes) / 1e6
        range_ = [[mean - min(found.held_out_losses)], [max(found.held_out_losses) - mean]]
        axes.errorbar(sent, mean, range_, fmt="o", color=f"C{number}", capsize=3, label=found.mode.name)
    axes.set(xscale="log", xlabel="sent by the busiest rank, MB", ylabel="held-out loss, nats per token")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("Loss against bytes; bars show the range over the seeds", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_times(axes: Axes, measurements: Sequence[Measurement]) -> None:
    names = [found.mode.name for found in measurements]
    left = [0.0] * len(measurements)
    for kind, color in _COLORS.items():
        widths = [mean_seconds_in_phase(found.phases, kind) for found in measurements]
        axes.barh(names, widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [end_of_phases(found.phases) - done for found, done in zip(measurements, left, strict=True)]
    axes.barh(names, rest, left=left, color="0.93", label="has done its last step")
    axes.set(xlabel="seconds of the virtual clock, mean over the ranks")
    axes.set_title("Time of the run on the virtual clock", fontsize=10)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5, columnspacing=1, handlelength=1)


def _draw_drifts(axes: Axes, measurements: Sequence[Measurement]) -> None:
    for number, found in enumerate(measurements):
        rounds = list(zip(*found.drifts, strict=True))
        if any(any(values) for values in rounds):
            at = [(index + 1) / len(rounds) for index in range(len(rounds))]
            axes.plot(
                at, [statistics.mean(values) for values in rounds], ".-", color=f"C{number}", label=found.mode.name
            )
    axes.set(xlabel="fraction of the run", ylabel="RMS distance from the mean", ylim=(0, None))
    axes.set_title("Drift of the replicas; modes without drift are not drawn", fontsize=10)
    if axes.lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_staleness(axes: Axes, measurements: Sequence[Measurement]) -> None:
    stale = [(number, found) for number, found in enumerate(measurements) if found.staleness]
    for at, (number, found) in enumerate(stale):
        values, width = sorted(found.staleness), 0.8 / len(stale)
        shares = [found.staleness[value] / found.staleness.total() for value in values]
        places = [value + (at + 0.5) * width - 0.4 for value in values]
        axes.bar(places, shares, width, color=f"C{number}", label=found.mode.name)
    axes.set(xlabel="updates between a pull and its push", ylabel="fraction of the updates")
    axes.set_title("Staleness" if stale else "Staleness: no asynchronous mode was measured", fontsize=10)
    if stale:
        axes.legend(fontsize=8)
