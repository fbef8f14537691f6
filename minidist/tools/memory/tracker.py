"""`--memory FILE`: what the memory of every rank consists of in one step, measured, beside what was estimated.

The step runs as any other, watched (`memory.py`): its numbers are what they would have been. Then the ranks' peaks are
gathered, and rank 0 writes a picture and, under the same name, the numbers: under other names first, then renamed, so
that a file is whole or is not there.
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
from minidist.tools.memory.breakdown import PeakByKind, engine_tensors_by_kind
from minidist.tools.memory.storages import MemoryPeak
from minidist.tools.output_files import check_memory_files
from minidist.train.agree import StepResult
from minidist.train.observer import Observer
from minidist.train.run_folder import write_atomically
from minidist.train.trainer import Trainer

_DRAWN = 16  # ranks; with more, the rank with the highest peak of each stage
_ALLOCATOR = "allocator's peak"


class MemoryTracker(Observer):
    """Measures the memory of one step of a run on every rank."""

    def __init__(self, config: Config):
        self._config = config
        self._report: str | None = None
        self._mine: tuple[MemoryPeak | None, str | None] | None = None

    def check(self) -> None:
        check_memory_files(self._config)

    def on_start(self, trainer: Trainer) -> None:
        self._engine, self._group, self._done = trainer.engine, trainer.control, trainer.progress.step
        self._step = self._config.memory.step or self._done + 2

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        """Measure the step if it is the one to measure."""
        if trainer.progress.step + 1 != self._step:
            yield
            return
        watch, wrong = PeakByKind(engine_tensors_by_kind(self._engine), self._group.world.device), None
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(watch)
            except RuntimeError as error:  # perhaps on this rank alone: it takes the step like the others
                wrong = str(error)
            yield
            try:
                stack.pop_all().close()
            except RuntimeError as error:
                wrong = str(error)
        self._mine = (None, wrong) if wrong else (watch.peak, None)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._mine is not None:
            self._gather()

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        if self.line is not None:
            trainer.note(self.line)

    def _gather(self) -> None:
        """Gather the measurements of all ranks; rank 0 writes them."""
        peaks, wrong = zip(*all_gather_object(self._mine, self._group), strict=True)
        self._mine = None
        if self._group.rank:
            return
        if ranks := [rank for rank, why in enumerate(wrong) if why]:
            self._report = (
                f"no memory measured: it takes torch's profiler, which {format_ranks(ranks)} cannot have in step "
                f"{self._step} ({wrong[ranks[0]]}). Let no other profiler run then, or give another --memory.step."
            )
            return
        world = self._group.world
        comm = replace(self._config.comm, backend=world.backend or self._config.comm.backend)
        costs = estimate(replace(self._config, comm=comm), world.size).ranks
        self._report = _write(self._config.memory.file, self._step, world.device.type, peaks, costs)

    @property
    def line(self) -> str | None:
        """What rank 0 says of it at the end of the run."""
        if self._report is not None or self._group.rank:
            return self._report
        if self._step <= self._done:
            return f"no memory measured: the run went on after step {self._done}, past --memory.step {self._step}"
        return f"no memory measured: the run ended before step {self._step}"


def measured_breakdown(peak: MemoryPeak) -> dict[str, int]:
    """The measured breakdown of the peak, with the kinds of the estimate, and the shared-memory segments."""
    return {kind: peak.breakdown.get(kind, 0) for kind in MEMORY_KINDS.values()} | {SHARED_MEMORY: peak.shared_segments}


def estimated_breakdown(cost: RankCost) -> dict[str, int]:
    """The estimated breakdown of the peak, and the shared-memory segments."""
    return cost.peak_breakdown | {SHARED_MEMORY: cost.shared_segment_bytes}


def _write(path: Path, step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost]) -> str:
    """Write the chart and the numbers; returns the lines to print."""
    report = table(step, device, peaks, costs)
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
        write_atomically(path, picture(step, device, peaks, costs, path.suffix[1:]))
    except OSError as error:  # not worth the end of a run
        return f"{report}\nthe picture {path} could not be written: {error.strerror or error}"
    return f"{report}\npicture: {path}; all ranks in numbers: {path.with_suffix('.json')}"


def table(step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost]) -> str:
    """Measured and estimated memory of the rank with the highest peak, a line for each kind."""
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


def picture(step: int, device: str, peaks: Sequence[MemoryPeak], costs: Sequence[RankCost], kind: str) -> bytes:
    """A bar chart of every rank, or of the rank with the highest peak of each stage. kind: of the file, such as png."""
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook user's choice

    shown = range(len(peaks))
    if len(peaks) > _DRAWN:
        of = {
            stage: [cost.rank for cost in costs if cost.coords["pp"] == stage]
            for stage in {c.coords["pp"] for c in costs}
        }
        most = sorted(max(ranks, key=lambda rank: peaks[rank].total) for ranks in of.values())
        shown = sorted(sorted(most, key=lambda rank: -peaks[rank].total)[:_DRAWN])
    bars = {
        "measured": [measured_breakdown(peaks[rank]) for rank in shown],
        "estimated": [estimated_breakdown(costs[rank]) for rank in shown],
    }
    empty = [part for part in bars["measured"][0] if not any(p[part] for held in bars.values() for p in held)]
    bars = {name: [{k: v for k, v in p.items() if k not in empty} for p in held] for name, held in bars.items()}
    figure = Figure(figsize=bar_figure_size(len(shown), 2), dpi=120)
    axes = figure.subplots()
    draw_memory_bars(axes, bars)
    for place, rank in enumerate(shown):
        if (allocator := peaks[rank].allocator_peak) is not None:
            label = _ALLOCATOR if not place else None
            axes.hlines(allocator, place - 0.35, place, color="black", linestyle=":", label=label)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.1 * allocator))
    stages = " (of each stage the one with the highest peak)" if len(shown) < len(peaks) else ""
    axes.set(title=f"peak memory in step {step}, on {device}", xlabel=f"rank{stages}")
    axes.set_xticks(range(len(shown)), [str(rank) for rank in shown])
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, bbox_inches="tight")
    return buffer.getvalue()
