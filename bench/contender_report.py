"""Output of a comparison of contenders: a table in the terminal, a plot, and JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.compare_contenders import Comparison, ContenderResult
from bench.contenders import NO_COMMUNICATION
from bench.environment import describe_machine, describe_workload
from bench.time_contenders import TOLERANCE
from bench.workload import Workload
from minidist.errors import format_count

MINIDIST_PREFIX = "minidist"  # of the names of minidist's contenders
MODE_DESCRIPTIONS = {
    "full": "token count, backward, reduction, norm, clipping, update, loss",
    "bare": "backward, reduction, update",
}


def title(work: Workload, rounds: int, steps: int, backend: str) -> str:
    """Describe the workload and the machine in two lines."""
    machine, workload = describe_machine(backend), describe_workload(work)
    return (
        f"{workload['parameters'] / 1e6:.2f}M parameters, global batch {workload['global_batch']} x "
        f"{workload['seq_len']} tokens, {format_count(rounds, 'round')} with turns of {format_count(steps, 'step')}\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads_per_rank']} thread per rank, torch "
        f"{machine['torch']}, backend {machine['backend']}"
    )


def print_comparison(comparison: Comparison, verdicts: Iterable[str], console: Console) -> None:
    """Print the table of one comparison, then its verdicts and the contenders left out."""
    mode, kernel = comparison.mode, comparison.results[0].kernel
    heading = f"{comparison.ranks} ranks, mode {mode} ({MODE_DESCRIPTIONS[mode]}), optimizer {kernel}"
    table = Table(title=heading, title_justify="left")
    columns = (
        *("ms/step", "vs no comm.", f"{MINIDIST_PREFIX} / this [95 %]", "CPU ms", "CPU ratio", "max rel. error"),
        *("tensors MiB", "PSS MiB"),
    )
    table.add_column("contender", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap="[95 %]" in column)
    for result in comparison.results:
        overhead, ratio, cpu_ratio = (
            result.time_over_no_communication,
            result.minidist_ratio,
            result.minidist_cpu_ratio,
        )
        table.add_row(
            result.name,
            f"{result.median_s * 1e3:.1f}",
            "-" if overhead is None else f"{(overhead.median - 1) * 100:+.1f} %",
            "-" if ratio is None else str(ratio),
            f"{np.median(result.cpu_s) * 1e3:.0f}",
            "-" if cpu_ratio is None else f"{cpu_ratio.median:.3f}",
            "-" if result.max_relative_error is None else f"{result.max_relative_error:.0e}",
            format_mib(result.tensor_bytes),
            format_mib(result.resident_bytes),
        )
    console.print(table)
    for line in [*comparison.left_out, *verdicts]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)  # [peers] is not markup


def format_mib(size: int | None) -> str:
    """Return bytes as MiB; "-" for None."""
    return "-" if size is None else f"{size / 2**20:.1f}"


def as_json(
    comparisons: Sequence[Comparison],
    verdicts: Callable[[Comparison], Iterable[str]],
    work: Workload,
    rounds: int,
    steps: int,
    backend: str,
) -> dict:
    """Return all measurements as a JSON-compatible dict: times in seconds, sizes in bytes."""
    return {
        "machine": describe_machine(backend),
        "workload": describe_workload(work),
        "rounds": rounds,
        "steps_per_turn": steps,
        "tolerance": TOLERANCE,
        "comparisons": [
            {
                "ranks": comparison.ranks,
                "mode": comparison.mode,
                "left_out": comparison.left_out,
                "verdicts": list(verdicts(comparison)),
                "contenders": {result.name: _result_as_json(result) for result in comparison.results},
            }
            for comparison in comparisons
        ],
    }


def _result_as_json(result: ContenderResult) -> dict:
    """Return the measurements of one contender as a JSON-compatible dict."""
    values = asdict(result) | {"median_s": result.median_s}
    for key in ("time_over_no_communication", "minidist_ratio", "minidist_cpu_ratio"):
        interval = getattr(result, key)
        values[key] = None if interval is None else interval._asdict()
    del values["name"]
    return values


def plot(comparisons: Sequence[Comparison], title: str, path) -> None:
    """Plot each comparison as three panels: step time, minidist's time over each contender's, peak memory."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.9 + sum(0.9 + 0.28 * len(comparison.results) for comparison in comparisons)
    figure, axes = pyplot.subplots(len(comparisons), 3, figsize=(14, height), squeeze=False, layout="constrained")
    for comparison, (times, ratios, sizes) in zip(comparisons, axes, strict=True):
        names = [result.name for result in comparison.results]
        colors = [_bar_color(name) for name in names]
        times.barh(names, [result.median_s * 1e3 for result in comparison.results], color=colors)
        for y, result in enumerate(comparison.results):
            times.text(result.median_s * 1e3, y, f" {result.median_s * 1e3:.0f}", va="center", fontsize=8)
        lower_bound = comparison.result(NO_COMMUNICATION)
        if lower_bound:
            times.axvline(lower_bound.median_s * 1e3, color="#777777", linestyle=":", linewidth=1)
        times.set_xlabel("ms per step (median)")
        times.set_title(f"{comparison.ranks} ranks, mode {comparison.mode}", loc="left", fontsize=10)
        times.margins(x=0.12)
        _plot_ratios(comparison, ratios)
        ratios.set_xlabel(f"time of {MINIDIST_PREFIX} / contender, 95 % interval")
        tensors = [(result.tensor_bytes or 0) / 2**20 for result in comparison.results]
        sizes.barh(names, tensors, color=colors)
        for y, size in enumerate(tensors):
            sizes.text(size, y, f" {size:.4g}" if size else " not measured", va="center", fontsize=8)
        sizes.set_xlabel("peak MiB per rank, tensors and shared-memory segments")
        sizes.margins(x=0.12)
        for axis in (times, ratios, sizes):
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in (ratios, sizes):
            axis.set_yticks(range(len(names)), [])
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bar_color(name: str) -> str:
    """Return the colour of a contender's bar: minidist, baseline or no communication."""
    if name == NO_COMMUNICATION:
        return "#bbbbbb"
    return "#c44e52" if name.startswith(MINIDIST_PREFIX) else "#4c72b0"


def _plot_ratios(comparison: Comparison, axis) -> None:
    """Plot minidist's time over each contender's, with its confidence interval."""
    axis.axvline(1.0, color="#777777", linewidth=1)
    for y, result in enumerate(comparison.results):
        if result.minidist_ratio is None or result.name == NO_COMMUNICATION:
            continue
        median, low, high = result.minidist_ratio
        axis.errorbar(median, y, xerr=[[median - low], [high - median]], fmt="o", color="#333333", capsize=3)
        axis.text(median, y - 0.22, f"{median:.3f}", ha="center", va="bottom", fontsize=8)
    axis.margins(x=0.2)
