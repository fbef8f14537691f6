"""`minidist train --memory FILE`: the peak memory of every rank in one step, measured and estimated.

Measuring the step (`breakdown`) changes none of its results. Afterwards rank 0 gathers the peaks of all ranks and
writes a chart, and the numbers as JSON beside it; both files are written atomically.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from minidist.comm import all_gather_object
from minidist.config import Config
from minidist.errors import format_ranks
from minidist.tools.estimate.estimate import MEMORY_KINDS, SHARED_MEMORY, RankCost, estimate
from minidist.tools.memory.bars import bar_figure_size, draw_memory_bars, format_bytes
from minidist.tools.memory.breakdown import PeakByKind, make_engine_tensor_lister
from minidist.tools.memory.storages import MemoryPeak
from minidist.tools.output_files import check_memory_files, write_atomically
from minidist.train.observer import Observer
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer

_DRAWN = 16  # ranks; with more, the rank with the highest peak of each stage
_ALLOCATOR = "allocator's peak"


class MemoryTracker(Observer):
    """Observer of a run that measures every rank's peak memory in one step and writes a chart (`--memory FILE`)."""

    def __init__(self, config: Config):
        self._config = config
        self._report: str | None = None
        self._measurement: tuple[MemoryPeak | None, str | None] | None = None

    def check_folder(self, folder: Path) -> None:
        """Raise UserError if the chart of `--memory` or the JSON file beside it exists or is not writable.

        folder: unused.
        """
        check_memory_files(self._config)

    def on_start(self, trainer: Trainer) -> None:
        """Choose the step to measure: `--memory.step`, or the second step of this run if that is not set."""
        self._engine, self._group, self._done = trainer.engine, trainer.control, trainer.progress.step
        self._step = self._config.memory.step or self._done + 2

    @contextlib.contextmanager
    def step_context(self, trainer: Trainer) -> Iterator[None]:
        """Return a context manager that measures the peak memory inside it, if the next step is the one to measure.

        Before other steps the context does nothing.
        """
        if trainer.progress.step + 1 != self._step:
            yield
            return
        measured, failure = PeakByKind(make_engine_tensor_lister(self._engine), self._group.world.device), None
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(measured)
            except RuntimeError as error:  # perhaps on this rank alone, which must still take part in the step
                failure = str(error)
            yield
            try:
                stack.pop_all().close()
            except RuntimeError as error:
                failure = str(error)
        self._measurement = (None, failure) if failure else (measured.peak, None)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """After the measured step, gather the peaks of all ranks; rank 0 writes the chart and a JSON file. Collective.

        After other steps, does nothing.
        """
        if self._measurement is not None:
            self._gather()

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Send `summary_line` as a note to all observers (the console prints it). Does nothing if it is None."""
        if self.summary_line is not None:
            trainer.send_note(self.summary_line)

    def _gather(self) -> None:
        """Gather the measurements of all ranks; rank 0 writes them."""
        peaks, failures = zip(*all_gather_object(self._measurement, self._group), strict=True)
        self._measurement = None
        if self._group.rank:
            return
        if ranks := [rank for rank, failure in enumerate(failures) if failure]:
            self._report = (
                f"no memory measured: {format_ranks(ranks)} could not start torch's profiler in step {self._step} "
                f"({failures[ranks[0]]}). Stop the other profiler, or give another --memory.step."
            )
            return
        world = self._group.world
        comm = replace(self._config.comm, backend=world.backend or self._config.comm.backend)
        costs = estimate(replace(self._config, comm=comm), world.size).ranks
        self._report = _write(self._config.memory.file, self._step, world.device.type, peaks, costs)

    @property
    def summary_line(self) -> str | None:
        """The text to print at the end: a table of the measured memory, or why there is none. None except on rank 0."""
        if self._report is not None or self._group.rank:
            return self._report
        if self._step <= self._done:
            return f"no memory measured: the run resumed after step {self._done}, past --memory.step {self._step}"
        return f"no memory measured: the run ended before step {self._step}"


def measured_breakdown(peak: MemoryPeak) -> dict[str, int]:
    """Return a measured peak as {kind of tensor, or shared memory: bytes}, with the kinds of `minidist estimate`."""
    return {kind: peak.breakdown.get(kind, 0) for kind in MEMORY_KINDS.values()} | {SHARED_MEMORY: peak.shared_segments}


def estimated_breakdown(cost: RankCost) -> dict[str, int]:
    """Return a rank's estimated peak as {kind of tensor, or shared memory: bytes}, like `measured_breakdown`."""
    return cost.peak_breakdown | {SHARED_MEMORY: cost.shared_segment_bytes}


def _write(path: Path, step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost]) -> str:
    """Write the chart and the numbers; returns the lines to print."""
    report = format_memory_table(step, device, peaks, costs)
    numbers = {
        "step": step,
        "device": device,
        "ranks": [
            {
                "rank": cost.rank,
                "coords": cost.coords,
                "measured": asdict(peak),
                "estimated": {
                    "total": cost.peak_memory_bytes,
                    "breakdown": cost.peak_breakdown,
                    "peak_by_kind": {kind: getattr(cost, name) for name, kind in MEMORY_KINDS.items()},
                    "shared_segments": cost.shared_segment_bytes,
                },
            }
            for peak, cost in zip(peaks, costs, strict=True)
        ],
    }
    try:
        write_atomically(path.with_suffix(".json"), json.dumps(numbers, indent=1))
        write_atomically(path, draw_memory_chart(step, device, peaks, costs, path.suffix[1:]))
    except OSError as error:  # not worth the end of a run
        return f"{report}\nthe picture {path} could not be written: {error.strerror or error}"
    return f"{report}\npicture: {path}; all ranks in numbers: {path.with_suffix('.json')}"


def format_memory_table(step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost]) -> str:
    """Return a table of measured and estimated bytes by kind of tensor, of the rank with the highest measured peak.

    step, device: the measured step and its device type, for the heading. peaks, costs: measurement and estimate of
    every rank, in rank order.
    """
    rank = max(range(len(peaks)), key=lambda rank: peaks[rank].total)
    measured, estimated = measured_breakdown(peaks[rank]), estimated_breakdown(costs[rank])
    segments = (SHARED_MEMORY, measured.pop(SHARED_MEMORY), estimated.pop(SHARED_MEMORY))
    rows = [(kind, count, estimated[kind]) for kind, count in measured.items() if count or estimated[kind]]
    rows += [("total", peaks[rank].total, costs[rank].peak_memory_bytes)]
    rows += [segments] if any(segments[1:]) else []
    lines = [f"{name:<18}{format_bytes(one):>10}{format_bytes(other):>12}" for name, one, other in rows]
    if peaks[rank].allocator_peak is not None:
        lines.append(f"{_ALLOCATOR:<18}{format_bytes(peaks[rank].allocator_peak):>10}")
    whose = "" if len(peaks) == 1 else f" of rank {rank}, the highest,"
    head = f"peak memory{whose} in step {step}, on {device}"
    return "\n".join([head, f"{'':<18}{'measured':>10}{'estimated':>12}", *lines])


def draw_memory_chart(
    step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost], file_format: str
) -> bytes:
    """Return a bar chart of every rank's measured and estimated memory by kind of tensor, as bytes of a picture file.

    step, device: the measured step and its device type, for the title. peaks, costs: measurement and estimate of every
    rank, in rank order. file_format: such as "png". With more than 16 ranks, the chart shows only the rank with the
    highest peak of each pipeline stage.
    """
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook user's choice

    shown = range(len(peaks))
    if len(peaks) > _DRAWN:
        highest: dict[int, int] = {}  # stage -> its rank with the highest peak
        for cost in costs:
            rank = highest.setdefault(cost.coords["pp"], cost.rank)
            if peaks[cost.rank].total > peaks[rank].total:
                highest[cost.coords["pp"]] = cost.rank
        shown = sorted(sorted(sorted(highest.values()), key=lambda rank: -peaks[rank].total)[:_DRAWN])
    bars = {
        "measured": [measured_breakdown(peaks[rank]) for rank in shown],
        "estimated": [estimated_breakdown(costs[rank]) for rank in shown],
    }
    breakdowns = [breakdown for by_rank in bars.values() for breakdown in by_rank]
    for empty in [kind for kind in breakdowns[0] if not any(breakdown[kind] for breakdown in breakdowns)]:
        for breakdown in breakdowns:
            del breakdown[empty]
    figure = Figure(figsize=bar_figure_size(len(shown), 2), dpi=120)
    axes = figure.subplots()
    draw_memory_bars(axes, bars)
    for position, rank in enumerate(shown):
        if (allocator := peaks[rank].allocator_peak) is not None:
            label = _ALLOCATOR if not position else None
            axes.hlines(allocator, position - 0.35, position, color="black", linestyle=":", label=label)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.1 * allocator))
    stages = " (the one with the highest peak of each stage)" if len(shown) < len(peaks) else ""
    axes.set(title=f"peak memory in step {step}, on {device}", xlabel=f"rank{stages}")
    axes.set_xticks(range(len(shown)), [str(rank) for rank in shown])
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, bbox_inches="tight")
    return buffer.getvalue()
