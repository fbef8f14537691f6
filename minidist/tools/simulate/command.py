"""`minidist simulate`: the timeline of a pipeline schedule, as a drawing, numbers or JSON."""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.tools.simulate.draw import WIDTH, color_drawing, draw_figure, draw_text
from minidist.tools.simulate.schedule_text import parse_schedule
from minidist.tools.simulate.timeline import PipelineTimeline, StageTimes, simulate_schedule

_DIGITS = 6

SUMMARIES = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward: the memory of `stages` micro-batches at most",
    "interleaved": "1f1b over several chunks of the model a stage: a smaller bubble, more transfers",
    "zb-h1": "1f1b with the backward in two halves: a third of the bubble",
    "zb-h2": "more forwards first: hardly a bubble, twice the memory",
    "zb-v": "two chunks a stage, down and back up: hardly a bubble in the memory of 1f1b",
}


@dataclass(frozen=True)
class SimulateOptions:
    """Simulate one pipeline schedule: its timeline, its bubble, and the micro-batches in flight on each stage.

    Kinds: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v. Times are for one micro-batch and all layers of a stage, in any
    unit; give one number for all stages, or one per stage.
    """

    kind: str | None = None
    """Pipeline schedule; 1f1b when not given."""
    stages: int | None = None
    """Number of pipeline stages; 4 when not given."""
    micro_batches: int | None = None
    """Micro-batches per step; twice the stages when not given."""
    chunks: int | None = None
    """Model chunks per pipeline stage. interleaved: 2 or more (2 when not given). zb-v: 2. The others: 1."""
    t_f: tuple[float, ...] = (1.0,)
    """Time of a forward pass (F)."""
    t_b: tuple[float, ...] = (1.0,)
    """Time of the input gradient (B), the part of the backward pass that the previous stage waits for."""
    t_w: tuple[float, ...] = (1.0,)
    """Time of the weight gradient (W), the other part of the backward pass."""
    t_comm: float = 0.0
    """Time to transfer a result to another stage, while both stages may compute."""
    file: Path | None = None
    """A text file with your own schedule: one line per stage, such as F0 F1 B0 B1 (F0.1 is the forward of micro-batch 0
    through chunk 1)."""
    placement: Literal["loop", "v"] = "loop"
    """Placement of the chunks of --file: chunk 1 starts on stage 0 (loop), or on the last stage (v)."""
    picture: Path | None = None
    """Write the drawing to this .png, .svg or .pdf."""
    json: bool = False
    """Print JSON, with times in the unit of the options, instead of the drawing."""


def main(options: SimulateOptions) -> int:
    """Simulate the pipeline schedule that the options describe, print its timeline or JSON, and return 0.

    Raises UserError for invalid options and schedules that cannot run.
    """
    if options.picture is not None:
        _check_figure_file(options.picture)
    timeline = simulate_schedule(
        choose_schedule(options), StageTimes(options.t_f, options.t_b, options.t_w, options.t_comm)
    )
    if options.picture is not None:
        draw_figure(timeline).savefig(options.picture)
    if options.json:
        print(json.dumps(timeline_json(timeline)))
    else:
        print_timeline(timeline)
    return 0


def choose_schedule(options: SimulateOptions) -> Schedule:
    """Return the schedule that the options describe. Raises UserError for conflicting options and unreadable files."""
    if options.file is None:
        stages = 4 if options.stages is None else options.stages
        micro_batches = 2 * stages if options.micro_batches is None else options.micro_batches
        kind = "1f1b" if options.kind is None else options.kind
        return build_schedule(kind, stages, micro_batches, options.chunks)
    conflicting = [name for name in ("kind", "stages", "micro_batches", "chunks") if getattr(options, name) is not None]
    if conflicting:
        name = conflicting[0].replace("_", "-")
        raise UserError(f"--file {options.file} already determines --{name}: leave --{name} out.")
    try:
        return parse_schedule(options.file.read_text(), str(options.file), options.placement)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(
            f"--file {options.file} cannot be read: {why}. Give a file with a line for each stage."
        ) from None


def timeline_json(timeline: PipelineTimeline) -> dict:
    """Return the figures of a timeline as `--json` prints them: step time, bubble, busy time and peaks of each stage.

    Times are rounded to six decimals, the bubble to four.
    """
    return {
        "kind": timeline.schedule.kind,
        "stages": timeline.schedule.num_stages,
        "micro_batches": timeline.schedule.micro_batches,
        "chunks": timeline.schedule.num_chunks,
        "total": round(timeline.steady_step_time, _DIGITS),
        "makespan": round(timeline.makespan, _DIGITS),
        "bubble": round(timeline.bubble, 4),
        "busy": [round(time, _DIGITS) for time in timeline.busy_times],
        "peak_live": timeline.peak_live_micro_batches,
    }


def print_timeline(timeline: PipelineTimeline) -> None:
    """Print a drawing of the timeline, in colours on a terminal, and below it the step time, bubble and peak memory."""
    from rich.console import Console

    description = SUMMARIES.get(timeline.schedule.kind)
    unit = "" if timeline.schedule.num_chunks == 1 else f" (each 1/{timeline.schedule.num_chunks} of a stage)"
    print(f"{timeline.schedule.kind}{f': {description}' if description else ''}\n")
    Console(soft_wrap=True).print(color_drawing(draw_text(timeline)))
    print(
        f"\ntotal      {timeline.steady_step_time:.6g}, the longest time of any stage from its first action to its last"
    )
    print(f"bubble     {timeline.bubble:.4f} of the total is idle, on average over the stages")
    live = textwrap.wrap(
        f"peak live  {_format_counts_by_stage(timeline.peak_live_micro_batches)}{unit}",
        WIDTH,
        subsequent_indent=" " * 11,
    )
    print("\n".join(live))


def _format_counts_by_stage(counts: list[int]) -> str:
    """Return numbers of micro-batches as text, once if all stages have the same number."""
    if len(counts) > 1 and len(set(counts)) == 1:
        return f"{counts[0]} micro-batches on each stage"
    return f"{' '.join(map(str, counts))} micro-batches, by stage"


def _check_figure_file(path: Path) -> None:
    """Raise UserError if matplotlib cannot write a figure to `path`."""
    from matplotlib.figure import Figure

    if not path.absolute().parent.is_dir():
        raise UserError(f"--picture {path}: there is no folder {path.absolute().parent}. Make it first.")
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise UserError(f"--picture {path} has an unknown file type: give a name that ends in .png, .svg or .pdf.")
