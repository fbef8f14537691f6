"""The pipeline simulator against published figures, an independent method, and properties for any times."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.tools.simulate.timeline import StageTimes, simulate_schedule
from minidist.validation import SCHEDULES
from tests.helpers.pipeline_reference import longest_paths, longest_stage_span

PUBLISHED = json.loads((Path(__file__).resolve().parents[1] / "published" / "zero_bubble.json").read_text())["rows"]
TIME = st.integers(0, 40).map(lambda eighths: eighths / 8)
SOME_TIME = st.integers(1, 40).map(lambda eighths: eighths / 8)  # exact in binary: sums are equal, not nearly


def times(row):
    return StageTimes(row["t_f"], row["t_b"], row["t_w"], row["t_comm"])


def timeline(kind, stages, micro_batches, *of, chunks=None):
    return simulate_schedule(build_schedule(kind, stages, micro_batches, chunks), StageTimes(*of))


def row_id(row):
    return f"{row['stages']}-{row['micro_batches']}-{row['model']}"


@pytest.mark.parametrize("row", PUBLISHED, ids=row_id)
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-h2"])
def test_the_bubble_is_the_published_one_to_four_decimals(kind, row):
    made = simulate_schedule(build_schedule(kind, row["stages"], row["micro_batches"]), times(row))
    assert round(made.bubble, 4) == row[kind]


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row["stages"] == 8][:3], ids=row_id)
def test_the_published_bubble_of_interleaved_leaves_out_transfers(row):
    """From the last stage back to the first only the first micro-batch of a group waits there; ours all wait."""
    stages, chunks = row["stages"], row["layers"] // row["stages"]
    made = build_schedule("interleaved", stages, row["micro_batches"], chunks)
    takes = {"F": row["t_f"] / chunks, "B": (row["t_b"] + row["t_w"]) / chunks}

    def carried(kind, micro_batch, stage):
        return stage != {"F": 0, "B": stages - 1}[kind] or micro_batch % stages == 0

    def bubble(carried):
        known = longest_paths(made.orders, lambda kind, _: takes[kind], row["t_comm"], carried=carried)
        total = longest_stage_span(made.orders, known)
        return 1 - row["micro_batches"] * (row["t_f"] + row["t_b"] + row["t_w"]) / total

    assert round(bubble(carried), 4) == row["interleaved"]
    ours = simulate_schedule(made, times(row)).bubble
    assert ours == pytest.approx(bubble(lambda *_: True), abs=1e-12) and ours > row["interleaved"]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(8, 256), (16, 256), (32, 256), (32, 64)])
def test_it_holds_for_sizes_that_are_not_published(kind, stages, micro_batches):
    made = timeline(kind, stages, micro_batches, 10.4, 10.2, 7.7, 0.408)
    ideal = micro_batches * (10.4 + 10.2 + 7.7)
    assert (
        made.steady_step_time == pytest.approx(ideal / (1 - made.bubble))
        and ideal < made.steady_step_time <= made.makespan
    )
    assert made.busy_times == pytest.approx([ideal] * stages)
    # No schedule is worse than the textbook's with everything that it moves on the way in and out besides.
    textbook = (stages - 1) * (10.4 + 10.2 + 7.7) + 2 * (stages + micro_batches) * 0.408 * (made.schedule.num_chunks)
    assert 0 < made.steady_step_time - ideal <= textbook
    assert max(made.peak_live_micro_batches) <= {"gpipe": micro_batches, "zb-h2": 2 * stages - 1}.get(
        kind, stages * made.schedule.num_chunks + stages
    )


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 3), st.lists(TIME, min_size=12, max_size=12), TIME)
def test_a_second_method_gives_every_start_and_end(kind, stages, groups, numbers, comm):
    """With another time for every stage; eighths add up without rounding, so they must be equal."""
    micro_batches = stages * groups if kind == "interleaved" else max(groups + 2, 2 * stages - 1)
    made = build_schedule(kind, stages, micro_batches)
    f, b, w = (numbers[i * 4 : i * 4 + stages] for i in range(3))
    assume(sum(f + b + w))
    splits = kind.startswith("zb")
    by_stage = {"F": f, "B": b if splits else [x + y for x, y in zip(b, w, strict=True)], "W": w}
    stage_of = {p: made.owner(p)[0] for p in range(made.num_parts)}
    known = longest_paths(
        made.orders, lambda kind, p: by_stage[kind][stage_of[p]] / made.num_chunks, comm, made.placement
    )
    got = simulate_schedule(made, StageTimes(f, b, w, comm))
    for stage, spans in enumerate(got.spans):
        for span in spans:
            key = (span.action.kind, span.action.micro_batch, made.position(stage, span.action.chunk))
            assert (span.start, span.end) == known[key]
    assert got.steady_step_time == longest_stage_span(made.orders, known, made.placement)


@given(st.integers(1, 6), st.integers(1, 20), SOME_TIME, SOME_TIME, SOME_TIME)
def test_without_communication_each_schedule_is_at_least_as_good_as_the_one_before(stages, more, f, b, w):
    """GPipe = 1F1B >= ZB-H1 >= ZB-H2, whatever the operations take."""
    few = more
    gpipe, one_f_one_b, zb_h1 = (
        timeline(kind, stages, few, f, b, w).steady_step_time for kind in ("gpipe", "1f1b", "zb-h1")
    )
    assert gpipe == one_f_one_b == (few + stages - 1) * (f + b + w) and one_f_one_b >= zb_h1
    many = 2 * stages - 2 + more
    assert (
        timeline("zb-h1", stages, many, f, b, w).steady_step_time
        >= timeline("zb-h2", stages, many, f, b, w).steady_step_time
    )


def test_zb_h2_with_few_micro_batches_would_be_worse_than_zb_h1_and_is_refused():
    """Why there is a least number: taken from many, seven micro-batches in six stages are slower than ZB-H1."""
    with pytest.raises(UserError, match="zb-h2 needs 2 x 6 stages - 1 = 11"):
        build_schedule("zb-h2", 6, 7)
    many = build_schedule("zb-h2", 6, 11)
    few = [[action for action in order if action.micro_batch < 7] for order in many.orders]
    slow = simulate_schedule(type(many)("zb-h2", 7, few), StageTimes(5, 0.5, 5)).steady_step_time
    assert slow > timeline("zb-h1", 6, 7, 5, 0.5, 5).steady_step_time


@given(st.integers(2, 6), st.integers(0, 6), SOME_TIME, st.integers(0, 8), st.integers(0, 8))
def test_the_bubbles_of_the_handcrafted_schedules_are_those_of_table_2(stages, more, w, over_b, over_f):
    """(p - 1)(T_F + T_B - T_W) and (p - 1)(T_F + T_B - 2 T_W), for T_W <= T_B, T_F as in transformers."""
    b, f = w + over_b / 8, w + over_f / 8
    micro_batches = 2 * stages + more
    ideal = micro_batches * (f + b + w)
    h1, h2 = (timeline(kind, stages, micro_batches, f, b, w).steady_step_time - ideal for kind in ("zb-h1", "zb-h2"))
    assert h1 == (stages - 1) * (f + b - w)
    assert h2 == (stages - 1) * (f + b - 2 * w)


@given(st.integers(1, 6), st.integers(1, 6), SOME_TIME, st.integers(0, 8), st.integers(0, 8))
def test_bubbles_with_few_micro_batches_match_appendix_h(stages, few, w, over_b, over_f):
    """m <= p and T_W <= T_B, T_F: (m + p - 1)(T_F + T_B) + T_W, against 1F1B's (m + p - 1)(T_F + T_B + T_W)."""
    assume(few <= stages)
    b, f = w + over_b / 8, w + over_f / 8
    assert timeline("zb-h1", stages, few, f, b, w).steady_step_time == (few + stages - 1) * (f + b) + w


@given(st.integers(1, 6), st.integers(0, 8), SOME_TIME)
def test_with_equal_times_zb_h2_and_zb_v_have_no_bubble(stages, more, t):
    assert timeline("zb-h2", stages, 2 * stages - 1 + more, t, t, t).bubble == 0
    assert timeline("zb-v", stages, 2 * stages - 1 + more, t, t, t).bubble == 0


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_chunks_divide_the_bubble_of_interleaved(stages, chunks):
    """Narayanan et al. 2021, section 2.2.2: (p - 1)(t_f + t_b) / v."""
    made = timeline("interleaved", stages, 3 * stages, 3.0, 3.0, 3.0, chunks=chunks)
    assert made.steady_step_time - 3 * stages * 9.0 == pytest.approx((stages - 1) * 9.0 / chunks)


def test_with_communication_gpipe_may_be_faster_than_one_f_one_b():
    """Its transfers hide behind the next forward; 1F1B's come back just when they are needed."""
    of = (18.522, 18.086, 9.337, 0.601)
    gpipe, one_f_one_b = timeline("gpipe", 8, 24, *of).steady_step_time, timeline("1f1b", 8, 24, *of).steady_step_time
    assert (round(gpipe, 1), round(one_f_one_b, 1)) == (1432.7, 1456.7)


def test_an_unsplit_backward_takes_b_plus_w():
    spans = timeline("1f1b", 1, 1, 1.0, 2.0, 4.0).spans
    assert [(str(span.action), span.start, span.end) for span in spans[0]] == [("F0", 0.0, 1.0), ("B0", 1.0, 7.0)]


def test_one_slow_stage_sets_the_pace_and_the_others_wait():
    made = timeline("1f1b", 3, 30, [1.0, 2.0, 1.0])
    assert made.busy_times == pytest.approx([90, 120, 90])
    assert 120 < made.steady_step_time < 130 and made.bubble == pytest.approx(1 - 100 / made.steady_step_time)


def test_a_time_for_every_part_of_the_model():
    """Parts 0, 1, 2, 3 of a V of two stages: stage 0 has the first and the last."""
    made = timeline("zb-v", 2, 1, [1.0, 2.0, 4.0, 8.0], 0.5, 0.5)
    takes = {(stage, str(s.action)): s.end - s.start for stage, spans in enumerate(made.spans) for s in spans}
    assert [takes[key] for key in ((0, "F0"), (1, "F0"), (1, "F0.1"), (0, "F0.1"))] == [1, 2, 4, 8]
    assert takes[0, "B0.1"] == 0.25  # half a stage


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 3), TIME)
@settings(max_examples=30)
def test_nothing_runs_before_what_it_needs_nor_two_at_once(kind, stages, groups, comm):
    micro_batches = stages * groups if kind == "interleaved" else max(groups, 2 * stages - 1)
    made = timeline(kind, stages, micro_batches, 1.5, 1.25, 0.5, comm)
    ends = {(stage, span.action): span.end for stage, spans in enumerate(made.spans) for span in spans}
    for stage, spans in enumerate(made.spans):
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
        for span in spans:
            for need in made.schedule.dependencies(stage, span.action):
                assert ends[need.stage, need.action] + (comm if need.stage != stage else 0) <= span.start


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ((-1.0,), "t-f is -1.0; a time is a number, 0 or more"),
        ((1.0, math.nan), "t-b is nan"),
        ((1.0, 1.0, [1.0, math.inf, 1.0, 1.0]), "t-w is inf"),
        (([1.0, 2.0],), "t-f has 2 times for 4 stages: give 1 for all of them, or 4"),
        (([],), "t-f has 0 times for 4 stages"),
        ((0.0, 0.0, 0.0), "t-f, t-b and t-w are all 0"),
        ((1e308,), "the sum of all times overflows"),
        ((1.0, 1.0, 1.0, 1e307), "the sum of all times overflows"),
        ((1.0, 1.0, 1.0, -0.5), "t-comm is -0.5; it must be 0 or more"),
    ],
)
def test_invalid_times_are_refused(of, message):
    with pytest.raises(UserError) as error:
        timeline("1f1b", 4, 8, *of)
    assert message in str(error.value)


def test_with_chunks_the_message_offers_a_time_for_every_part():
    with pytest.raises(
        UserError, match="t-f has 3 times for 4 stages: give 1 for all of them, or 4, or 8 for the model chunks"
    ):
        timeline("zb-v", 4, 8, [1.0, 2.0, 3.0])
