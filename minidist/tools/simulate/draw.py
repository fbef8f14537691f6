"""Draws a timeline as text or as a figure, in the colours of Qi et al. 2023."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from minidist.errors import format_count
from minidist.parallel.pipeline.actions import Action
from minidist.parallel.pipeline.transfers import Span
from minidist.tools.simulate.timeline import PipelineTimeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

WIDTH = 100
_POINTS = 720  # width of the figure's axes in points (1/72 inch)
_CELL = 4  # upper limit for the columns of the shortest action: enough for its name
# Dark for chunk 0, with white numbers, and light for later chunks, with black ones (Qi et al. 2023, figure 8).
COLORS = {"F": ("#2f5fa8", "#a9c6ee"), "B": ("#1b8a8f", "#a5dfe0"), "W": ("#5fa52a", "#c3e6ae")}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def draw_text(timeline: PipelineTimeline, width: int = WIDTH) -> str:
    """Draw the timeline as text: a line per stage, time from left to right, `.` where the stage is idle.

    width: the largest number of characters of a stage's line. Actions show their names (F12) or, if the shortest is
    less than two columns wide, their letters (F-). Where even that is too wide, each column shows the letter of the
    action at its middle. Later chunks are in lower case.
    """
    labels = [f"stage {stage} " for stage in range(timeline.schedule.num_stages)]
    edge = len(labels[-1])
    step, shortest = _choose_scale(timeline, width - edge)
    lines = [
        label.rjust(edge) + _draw_stage(spans, round(timeline.makespan / step), step, shortest)
        for label, spans in zip(labels, timeline.spans, strict=True)
    ]
    letters = (
        "F forward, B input gradient, W weight gradient" if _splits_backward(timeline) else "F forward, B backward"
    )
    lower = "; lower case: chunks after the first" if timeline.schedule.num_chunks > 1 else ""
    return "\n".join([*lines, f"{letters}{lower}; . idle; a column is {step:.4g}"])


def _splits_backward(timeline: PipelineTimeline) -> bool:
    """Return whether the schedule splits backward into input gradients (B) and weight gradients (W)."""
    return timeline.schedule.splits_backward


def _choose_scale(timeline: PipelineTimeline, columns: int) -> tuple[float, int]:
    """Return (time of one column, columns of the shortest action); the columns are 0 if it has less than one."""
    shortest = min(span.end - span.start for spans in timeline.spans for span in spans if span.end > span.start)
    cells = min(_CELL, int(columns * shortest / timeline.makespan * (1 + 1e-9)))
    return shortest / cells if cells else timeline.makespan / columns, cells


def _draw_stage(spans: Sequence[Span], columns: int, step: float, shortest: int) -> str:
    """Draw the actions of a stage as text. step: time of a column. shortest: columns of the shortest action."""
    starts = [span.start for span in spans]
    actions: list[Action | None] = []
    for column in range(columns):
        middle = (column + 0.5) * step
        index = bisect_right(starts, middle) - 1
        actions.append(spans[index].action if index >= 0 and middle < spans[index].end else None)
    return "".join(_format_action(action, len(list(columns)), shortest) for action, columns in groupby(actions))


def _format_action(action: Action | None, width: int, shortest: int) -> str:
    """Return the text of `width` columns for an action, dots for idle time (None)."""
    if action is None:
        return "." * width
    letter = action.kind.lower() if action.chunk else action.kind
    name = f"{letter}{action.micro_batch}"
    if not shortest:
        return letter * width
    return (name if shortest > 1 and len(name) <= width else letter).ljust(width, "-")


def color_drawing(drawing: str) -> "Text":
    """Colour the text that `draw_text` returns; the result is for rich to print."""
    from rich.text import Text

    lines = [Text(line) for line in drawing.splitlines()]
    for line in lines[:-1]:
        for kind, (dark, light) in COLORS.items():
            line.highlight_regex(rf"{kind}[\d-]*", f"white on {dark}")
            line.highlight_regex(rf"{kind.lower()}[\d-]*", f"black on {light}")
    return Text("\n").join(lines)


def draw_figure(timeline: PipelineTimeline, title: str | None = None) -> "Figure":
    """Draw the timeline as a matplotlib figure: a row of bars per stage, with micro-batch numbers where they fit.

    Save it with `.savefig(path)`; a notebook shows it. title: if None, the schedule's kind, size, bubble and peak
    number of micro-batches in flight; with several model chunks, of (micro-batch, chunk) pairs in flight.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    figure = Figure(figsize=(11, 1.2 + 0.36 * schedule.num_stages), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for stage, spans in enumerate(timeline.spans):
        bars = [(span.start, span.end - span.start) for span in spans]
        axes.broken_barh(
            bars, (stage - 0.45, 0.9), facecolors=[_color(s.action) for s in spans], edgecolor="white", lw=0.3
        )
        for span in spans:
            _draw_micro_batch_number(axes, stage, span, timeline)
    axes.set(xlabel="time", ylabel="stage", yticks=range(schedule.num_stages), title=title or _format_title(timeline))
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.num_stages - 0.45, -0.55)
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = "FBW" if _splits_backward(timeline) else "FB"
    shades = [(kind, chunk) for kind in kinds for chunk in range(min(2, schedule.num_chunks))]
    handles = [
        Patch(color=COLORS[kind][chunk], label=_format_legend_label(kind, chunk, timeline)) for kind, chunk in shades
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(kinds), frameon=False, fontsize=8)
    return figure


def _color(action: Action) -> str:
    """Return the colour of an action, by its kind and chunk."""
    return COLORS[action.kind][min(action.chunk, 1)]


def _draw_micro_batch_number(axes, stage: int, span: Span, timeline: PipelineTimeline) -> None:
    """Write the micro-batch's number in its bar, as large as the longest number fits; nothing if too small to read."""
    points = _POINTS * (span.end - span.start) / timeline.makespan
    size = min(8.0, 1.2 * points / len(str(timeline.schedule.micro_batches - 1)))
    if size >= 3.5:
        color = "black" if span.action.chunk else "white"
        middle = (span.start + span.end) / 2
        axes.text(middle, stage, span.action.micro_batch, ha="center", va="center_baseline", fontsize=size, color=color)


def _format_title(timeline: PipelineTimeline) -> str:
    """Return the title of the figure: kind and size of the schedule, bubble, peak micro-batches in flight."""
    schedule = timeline.schedule
    micro_batches = format_count(schedule.micro_batches, "micro-batch", "micro-batches")
    size = f"{format_count(schedule.num_stages, 'stage')}, {micro_batches}"
    chunks = f", {schedule.num_chunks} chunks a stage" if schedule.num_chunks > 1 else ""
    peak = f"peak {max(timeline.peak_live_micro_batches)}" + (" chunks" if schedule.num_chunks > 1 else "")
    return f"{schedule.kind}, {size}{chunks}: bubble {timeline.bubble:.4f}, {peak} in flight"


def _format_legend_label(kind: str, chunk: int, timeline: PipelineTimeline) -> str:
    """Return the legend's text for actions of this kind and chunk."""
    name = "input gradient" if kind == "B" and _splits_backward(timeline) else _NAMES[kind]
    later = f"chunk {chunk}" if timeline.schedule.num_chunks <= 2 else ("chunk 0", "later chunks")[chunk]
    return f"{kind} {name}" + (f", {later}" if timeline.schedule.num_chunks > 1 else "")
