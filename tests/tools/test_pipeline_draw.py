"""Drawings of a pipeline timeline show every operation on its stage at its time."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from minidist.parallel.pipeline.schedules import build_schedule
from minidist.tools.simulate.draw import COLORS, color_drawing, draw_figure, draw_text
from minidist.tools.simulate.timeline import StageTimes, simulate_schedule
from minidist.validation import SCHEDULES


def timeline(kind, stages, micro_batches, *times):
    return simulate_schedule(build_schedule(kind, stages, micro_batches), StageTimes(*times))


def test_a_small_schedule_shows_every_name():
    assert draw_text(timeline("1f1b", 2, 3)) == (
        "stage 0 F0--F1--........B0------F2--B1------....B2------\n"
        "stage 1 ....F0--B0------F1--B1------F2--B2------........\n"
        "F forward, B backward; . idle; a column is 0.25"
    )


def test_chunks_after_the_first_are_in_lower_case():
    lines = draw_text(timeline("zb-v", 2, 1)).splitlines()
    assert lines[:2] == [
        "stage 0 F0--........f0--b0--w0--........B0--W0--",
        "stage 1 ....F0--f0--........b0--w0--B0--W0--....",
    ]
    assert lines[2].startswith("F forward, B input gradient, W weight gradient; lower case: chunks after the first")


def test_narrow_drawings_use_letters_and_then_the_middle_operation():
    made = timeline("1f1b", 2, 4)
    assert draw_text(made, 24).splitlines()[:2] == ["stage 0 FF..B-FB-FB-.B-", "stage 1 .FB-FB-FB-FB-.."]
    assert draw_text(made, 18).splitlines()[:2] == ["stage 0 F..BFBFB.B", "stage 1 .BBBBBBBB."]


def test_on_a_terminal_operations_have_the_colours_of_the_picture():
    drawing = draw_text(timeline("zb-v", 2, 1))
    message = color_drawing(drawing)
    assert message.plain == drawing
    first = [
        (message.plain[span.start : span.end], span.style)
        for span in message.spans
        if span.end <= message.plain.index("\n")
    ]
    assert sorted(first) == [
        ("B0--", f"white on {COLORS['B'][0]}"),
        ("F0--", f"white on {COLORS['F'][0]}"),
        ("W0--", f"white on {COLORS['W'][0]}"),
        ("b0--", f"black on {COLORS['B'][1]}"),
        ("f0--", f"black on {COLORS['F'][1]}"),
        ("w0--", f"black on {COLORS['W'][1]}"),
    ]
    assert all(span.end <= message.plain.index("F forward") for span in message.spans)  # the legend has none


def drawn(line):
    """The operations of a line with names, in order, with the columns each takes."""
    found = re.finditer(r"([FBWfbw])(\d*)-*", line)
    return [(m[1].upper() + m[2] + (".1" if m[1].islower() else ""), m.start(), len(m[0])) for m in found]


@given(st.sampled_from(SCHEDULES), st.integers(1, 3), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.0, 1.0]))
def test_each_operation_stands_where_it_runs(kind, stages, b, comm):
    """At four columns for a unit of time, all names fit and all edges fall between columns."""
    made = timeline(kind, stages, 2 * stages, 1.0, b, 1.0, comm)
    width = round(made.makespan * 8) + len("stage 0 ")
    for spans, line in zip(made.spans, draw_text(made, width).splitlines(), strict=False):
        step = min(s.end - s.start for spans in made.spans for s in spans) / 4
        expected = [(str(s.action), round(s.start / step), round((s.end - s.start) / step)) for s in spans]
        assert drawn(line.removeprefix(line[: len("stage 0 ")])) == expected


@given(st.sampled_from(SCHEDULES), st.integers(1, 12), st.integers(1, 3), st.integers(30, 140))
def test_no_line_of_a_stage_is_wider_than_asked(kind, stages, groups, width):
    made = timeline(kind, stages, stages * groups + stages, 1.3, 1.1, 0.7, 0.2)
    lines = draw_text(made, width).splitlines()
    assert len(lines) == stages + 1
    assert max(map(len, lines[:-1])) <= width and len({len(line) for line in lines[:-1]}) == 1
    assert all(re.fullmatch(r" *stage \d+ [FBWfbw.0-9-]+", line) for line in lines[:-1])


def test_the_share_of_dots_is_the_idle_share():
    made = timeline("gpipe", 8, 32, 1.3, 1.1, 0.7)
    rows = "".join(line.removeprefix("stage ")[2:] for line in draw_text(made, 2000).splitlines()[:-1])
    assert rows.count(".") / len(rows) == pytest.approx(made.bubble, abs=0.01)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_picture_has_a_bar_for_every_operation_in_its_colour(kind):
    made = timeline(kind, 4, 8, 1.0, 1.5, 0.5, 0.25)
    axes = draw_figure(made).axes[0]
    assert len(axes.collections) == 4
    for stage, (bars, spans) in enumerate(zip(axes.collections, made.spans, strict=True)):
        boxes = [path.get_extents() for path in bars.get_paths()]
        assert [(box.x0, box.x1) for box in boxes] == [(s.start, s.end) for s in spans]
        assert {round((box.y0 + box.y1) / 2, 6) for box in boxes} == {stage}
        colors = [to_hex(color) for color in bars.get_facecolors()]
        assert colors == [COLORS[span.action.kind][min(span.action.chunk, 1)] for span in spans]
    assert f"bubble {made.bubble:.4f}" in axes.get_title()
    assert ("chunks in flight" in axes.get_title()) == (made.schedule.num_chunks > 1)
    low, high = axes.get_ylim()
    assert low > high  # stage 0 on top


def test_the_numbers_in_the_picture_are_the_micro_batches():
    made = timeline("zb-h1", 4, 8)
    texts = [(round(t.get_position()[1]), t.get_text()) for t in draw_figure(made).axes[0].texts]
    assert texts == [(stage, str(span.action.micro_batch)) for stage, spans in enumerate(made.spans) for span in spans]


def test_a_picture_too_dense_for_numbers_has_none_and_a_legend_says_what_colours_mean():
    figure = draw_figure(timeline("zb-v", 8, 256))
    assert not figure.axes[0].texts
    labels = [entry.get_text() for entry in figure.legends[0].get_texts()]
    assert labels == [
        f"{name}, chunk {c}" for name in ("F forward", "B input gradient", "W weight gradient") for c in (0, 1)
    ]
