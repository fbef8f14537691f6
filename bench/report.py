"""The figures of contests as a table for the terminal, as a picture, and as JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import rounds
from bench.contest import FLOOR, Row, Run
from bench.facts import machine_facts, workload_facts
from bench.workload import Workload

OURS = "minidist"  # how the names of ours begin
MODE_TEXT = {
    "full": "count, backward, reduction, norm, clip, update, logged loss",
    "bare": "backward, reduction, update",
}


def heading(work: Workload, n_rounds: int, steps: int, backend: str) -> str:
    """Machine and workload in two lines."""
    m, w = machine_facts(backend), workload_facts(work)
    return (
        f"{w['parameters'] / 1e6:.2f}M parameters, global batch {w['global_batch']} x {w['seq_len']} tokens, "
        f"{n_rounds} rounds of {steps} steps\n"
        f"{m['processor']}, {m['cores']} cores, {m['threads_per_rank']} thread per rank, torch {m['torch']}, "
        f"backend {m['backend']}"
    )


def print_run(run: Run, verdict: Iterable[str], console: Console) -> None:
    title = f"{run.ranks} ranks, {run.mode}: {MODE_TEXT[run.mode]}; {run.rows[0].kernel} for all"
    table = Table(title=title, title_justify="left")
    columns = ("ms", "over floor", f"{OURS} / it [95 %]", "CPU ms", "of CPU", "off", "peak MiB", "PSS MiB")
    table.add_column("contender", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in run.rows:
        table.add_row(
            row.name,
            f"{row.median_s * 1e3:.1f}",
            "-" if row.over_floor is None else f"{(row.over_floor.median - 1) * 100:+.1f} %",
            "-" if row.ours is None else str(row.ours),
            f"{np.median(row.cpu_s) * 1e3:.0f}",
            "-" if row.ours_cpu is None else f"{row.ours_cpu.median:.3f}",
            "-" if row.agreement is None else f"{row.agreement:.0e}",
            _mib(row.tensor_bytes),
            _mib(row.resident_bytes),
        )
    console.print(table)
    for line in [*run.left_out, *verdict]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)  # [peers] is the name of an extra


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def as_json(
    runs: Sequence[Run],
    verdict: Callable[[Run], Iterable[str]],
    work: Workload,
    n_rounds: int,
    steps: int,
    backend: str,
) -> dict:
    """Everything that was measured, for `--json`. Times in seconds, sizes in bytes."""
    return {
        "machine": machine_facts(backend),
        "workload": workload_facts(work),
        "rounds": n_rounds,
        "steps_per_round": steps,
        "tolerance": rounds.TOLERANCE,
        "runs": [
            {
                "ranks": run.ranks,
                "mode": run.mode,
                "left_out": run.left_out,
                "verdict": list(verdict(run)),
                "contenders": {row.name: _row_json(row) for row in run.rows},
            }
            for run in runs
        ],
    }


def _row_json(row: Row) -> dict:
    values = asdict(row) | {"median_s": row.median_s}
    for key in ("over_floor", "ours", "ours_cpu"):
        interval = getattr(row, key)
        values[key] = None if interval is None else interval._asdict()
    del values["name"]
    return values


def draw(runs: Sequence[Run], title: str, path) -> None:
    """A row of panels per run: step time, our time over each, memory at the peak."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.9 + sum(0.9 + 0.28 * len(run.rows) for run in runs)
    figure, axes = pyplot.subplots(len(runs), 3, figsize=(14, height), squeeze=False, layout="constrained")
    for run, (times, ratios, sizes) in zip(runs, axes, strict=True):
        names = [row.name for row in run.rows]
        colors = ["#c44e52" if name.startswith(OURS) else "#bbbbbb" if name == FLOOR else "#4c72b0" for name in names]
        times.barh(names, [row.median_s * 1e3 for row in run.rows], color=colors)
        for at, row in enumerate(run.rows):
            times.text(row.median_s * 1e3, at, f" {row.median_s * 1e3:.0f}", va="center", fontsize=8)
        floor = run.row(FLOOR)
        if floor:
            times.axvline(floor.median_s * 1e3, color="#777777", linestyle=":", linewidth=1)
        times.set_xlabel("ms per step (median)")
        times.set_title(f"{run.ranks} ranks, {run.mode}", loc="left", fontsize=10)
        times.margins(x=0.12)
        _draw_ratios(run, names, ratios)
        ratios.set_xlabel(f"{OURS} / contender, 95 % interval")
        tensors = [(row.tensor_bytes or 0) / 2**20 for row in run.rows]
        sizes.barh(names, tensors, color=colors)
        for at, size in enumerate(tensors):
            sizes.text(size, at, f" {size:.4g}" if size else " not measured", va="center", fontsize=8)
        sizes.set_xlabel("peak MiB of tensors and segments")
        sizes.margins(x=0.12)
        for axis in (times, ratios, sizes):
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in (ratios, sizes):
            axis.set_yticks(range(len(names)), [])
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_ratios(run: Run, names: Sequence[str], axis) -> None:
    axis.axvline(1.0, color="#777777", linewidth=1)
    for at, row in enumerate(run.rows):
        if row.ours is None or row.name == FLOOR:
            continue
        median, low, high = row.ours
        axis.errorbar(median, at, xerr=[[median - low], [high - median]], fmt="o", color="#333333", capsize=3)
        axis.text(median, at - 0.22, f"{median:.3f}", ha="center", va="bottom", fontsize=8)
    axis.margins(x=0.2)
