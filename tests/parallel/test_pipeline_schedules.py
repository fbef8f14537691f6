"""Pipeline schedules against the figures and the memory claims of their papers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Action, StageAction, last_backward_index
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.tools.simulate.check import check_schedule, live_micro_batches_per_action, peak_live_micro_batches
from minidist.validation import SCHEDULES

STAGES = st.integers(1, 6)
MICRO_BATCHES = st.integers(1, 14)


def any_schedule(kind, stages, micro_batches, chunks=3):
    """A schedule of this kind, with more micro-batches if the kind needs them."""
    if kind == "interleaved":
        return build_schedule(kind, stages, stages * (1 + micro_batches // 4), chunks)
    return build_schedule(kind, stages, max(micro_batches, 2 * stages - 1) if kind == "zb-h2" else micro_batches)


def micro_batch_numbers(order):
    """One line of a paper's figure: the micro-batch of each operation, counted from 1."""
    return " ".join(str(action.micro_batch + 1) for action in order)


def operation_kinds(order):
    return "".join(action.kind for action in order)


# Qi et al. 2023, figures 2, 3 and 8: 4 stages, 8 micro-batches.
FIGURES = {
    "1f1b": """1 2 3 4 1 5 2 6 3 7 4 8 5 6 7 8
               1 2 3 1 4 2 5 3 6 4 7 5 8 6 7 8
               1 2 1 3 2 4 3 5 4 6 5 7 6 8 7 8
               1 1 2 2 3 3 4 4 5 5 6 6 7 7 8 8""",
    "zb-h1": """1 2 3 4 1 1 5 2 2 6 3 3 7 4 4 8 5 5 6 6 7 7 8 8
                1 2 3 1 4 2 1 5 3 2 6 4 3 7 5 4 8 6 5 7 6 8 7 8
                1 2 1 3 2 4 3 1 5 4 2 6 5 3 7 6 4 8 7 5 8 6 7 8
                1 1 2 2 3 3 4 4 1 5 5 2 6 6 3 7 7 4 8 8 5 6 7 8""",
    "zb-h2": """1 2 3 4 5 6 7 1 1 8 2 2 3 3 4 4 5 5 6 6 7 7 8 8
                1 2 3 4 5 1 6 2 7 3 1 8 4 2 5 3 6 4 7 5 8 6 7 8
                1 2 3 1 4 2 5 3 6 4 7 5 1 8 6 2 7 3 8 4 5 6 7 8
                1 1 2 2 3 3 4 4 5 5 6 6 7 7 1 8 8 2 3 4 5 6 7 8""",
    "zb-v": """1 2 3 4 5 6 7 1 1 1 2 2 2 3 3 3 4 4 4 8 1 1 5 5 5 2 2 6 6 6 3 3 7 7 7 4 4 8 8 8 5 5 6 6 7 7 8 8
               1 2 3 4 5 1 6 2 1 1 3 2 2 4 3 3 7 1 1 5 4 4 8 2 2 6 5 5 3 3 7 6 6 4 4 8 7 7 5 8 6 5 7 8 8 6 7 8
               1 2 3 1 4 2 5 3 1 1 4 2 2 6 1 1 5 3 3 7 2 2 6 4 4 8 3 3 7 5 5 4 4 8 6 6 5 7 6 8 7 5 8 7 6 8 7 8
               1 1 2 2 3 3 4 4 1 1 5 1 1 5 2 2 6 2 2 6 3 3 7 3 3 7 4 4 8 4 4 8 5 5 5 6 6 7 7 8 8 5 6 6 7 7 8 8""",
}


@pytest.mark.parametrize("kind", FIGURES)
def test_stage_orders_match_the_papers_figures(kind):
    rows = [" ".join(row.split()) for row in FIGURES[kind].splitlines()]
    assert [micro_batch_numbers(order) for order in build_schedule(kind, 4, 8).orders] == rows


def test_zb_h1_delays_weight_gradients_by_stage():
    """The letters beside the numbers of figure 3, top."""
    orders = build_schedule("zb-h1", 4, 8).orders
    assert operation_kinds(orders[0]) == "FFFF" + "BWF" * 4 + "BW" * 4
    assert operation_kinds(orders[3]) == "FB" * 3 + "FBW" * 5 + "WWW"


def test_gpipe_runs_all_forwards_first():
    assert {operation_kinds(order) for order in build_schedule("gpipe", 3, 5).orders} == {"F" * 5 + "B" * 5}


def test_interleaved_takes_a_group_of_micro_batches_through_each_chunk():
    """Narayanan et al. 2021, figure 4, bottom: 4 devices, 8 micro-batches, 2 chunks; its first and its last device."""
    first, *_, last = build_schedule("interleaved", 4, 8).orders
    forwards = [f"{action.micro_batch + 1}{'ab'[action.chunk]}" for action in first if action.kind == "F"]
    assert " ".join(forwards) == "1a 2a 3a 4a 1b 2b 3b 4b 5a 6a 7a 8a 5b 6b 7b 8b"
    backwards = [f"{action.micro_batch + 1}{'ab'[action.chunk]}" for action in last if action.kind == "B"]
    assert " ".join(backwards) == "1b 2b 3b 4b 1a 2a 3a 4a 5b 6b 7b 8b 5a 6a 7a 8a"
    assert (
        operation_kinds(first) == "F" * 11 + "BF" * 5 + "B" * 11
        and operation_kinds(last) == "F" * 4 + "FB" * 12 + "B" * 4
    )


@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES)
def test_every_micro_batch_goes_once_through_every_chunk_and_nothing_deadlocks(kind, stages, micro_batches):
    made = any_schedule(kind, stages, micro_batches)
    kinds = "FBW" if kind.startswith("zb") else "FB"
    due = Counter((k, m, c) for k in kinds for m in range(made.micro_batches) for c in range(made.num_chunks))
    assert [Counter(map(tuple, order)) for order in made.orders] == [due] * stages
    assert check_schedule(made) == peak_live_micro_batches(made)


@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES)
def test_owner_and_position_are_each_others_inverse(kind, stages, micro_batches):
    made = any_schedule(kind, stages, micro_batches)
    places = [(stage, chunk) for stage in range(stages) for chunk in range(made.num_chunks)]
    assert sorted(made.position(*place) for place in places) == list(range(made.num_parts))
    assert all(made.owner(made.position(*place)) == place for place in places)


@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES)
def test_feeds_and_needs_are_inverse(kind, stages, micro_batches):
    made = any_schedule(kind, stages, micro_batches)
    places = [StageAction(stage, action) for stage, order in enumerate(made.orders) for action in order]
    fed = {(place, consumer) for place in places if (consumer := made.consumer(*place))}
    assert fed == {(n, p) for p in places for n in made.dependencies(*p) if n.action.kind == p.action.kind}
    assert len(fed) == 2 * (made.num_parts - 1) * made.micro_batches


def test_zb_v_ends_on_its_first_stage():
    made = build_schedule("zb-v", 3, 5)
    assert [made.owner(position) for position in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


@given(STAGES, MICRO_BATCHES)
def test_1f1b_keeps_one_live_micro_batch_per_stage_from_its_own_on(stages, micro_batches):
    assert peak_live_micro_batches(build_schedule("1f1b", stages, micro_batches)) == [
        min(stages - stage, micro_batches) for stage in range(stages)
    ]


@given(STAGES, MICRO_BATCHES)
def test_gpipe_keeps_all_micro_batches_live(stages, micro_batches):
    assert peak_live_micro_batches(build_schedule("gpipe", stages, micro_batches)) == [micro_batches] * stages


@given(STAGES, MICRO_BATCHES)
def test_live_micro_batches_of_zero_bubble_schedules_match_the_paper(stages, micro_batches):
    """Qi et al. 2023, table 2 and section 6: p, 2p - 1, and for ZB-V p, which is 2p chunks of half a stage."""
    assert (
        peak_live_micro_batches(build_schedule("zb-h1", stages, micro_batches)) == [min(stages, micro_batches)] * stages
    )
    enough = 2 * stages - 1 + micro_batches
    assert peak_live_micro_batches(build_schedule("zb-h2", stages, enough)) == [2 * stages - 1] * stages
    assert peak_live_micro_batches(build_schedule("zb-v", stages, enough)) == [2 * stages] * stages
    assert max(peak_live_micro_batches(build_schedule("zb-v", stages, micro_batches))) <= 2 * min(stages, micro_batches)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaved_keeps_more_micro_batches_live_than_1f1b(stages, chunks):
    """Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) of 1F1B's p micro-batches on the first stage."""
    peak = peak_live_micro_batches(build_schedule("interleaved", stages, 4 * stages, chunks))[0]
    assert peak / chunks == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


def test_a_micro_batch_is_live_until_its_last_backward_ends():
    assert live_micro_batches_per_action(build_schedule("1f1b", 2, 3), 0) == [1, 2, 2, 2, 2, 1]
    assert live_micro_batches_per_action(build_schedule("zb-h1", 2, 2), 1) == [1, 1, 2, 2, 2, 1]


@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES)
def test_a_chunks_gradients_are_complete_after_its_last_backward(kind, stages, micro_batches):
    made = any_schedule(kind, stages, micro_batches)
    for stage, order in enumerate(made.orders):
        for chunk, index in last_backward_index(made, stage).items():
            ends = ("W",) if kind.startswith("zb") else ("B",)
            assert order[index].kind in ends and order[index].chunk == chunk
            assert not [action for action in order[index + 1 :] if action.chunk == chunk and action.kind in ends]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb-h3", 4, 8), "there is no schedule 'zb-h3'; did you mean zb-h2?"),
        (("1f1b", 0, 8), "1f1b with 0 stages: a pipeline needs at least 1"),
        (("gpipe", 4, 0), "gpipe with 0 micro-batches: a pipeline needs at least 1"),
        (("interleaved", 4, 10), "10 is not a multiple of 4. Give 8 or 12"),
        (("interleaved", 4, 3), "3 is not a multiple of 4. Give 4"),
        (("interleaved", 4, 8, 1), "interleaved needs 2 or more chunks per stage, but chunks is 1"),
        (("1f1b", 4, 8, 2), "1f1b needs 1 chunk per stage, but chunks is 2: leave it out, or choose interleaved"),
        (("zb-v", 4, 8, 3), "zb-v needs 2 chunks per stage, but chunks is 3"),
        (
            ("zb-h2", 4, 6),
            "= 7 micro-batches in flight, but there are only 6: give 7 micro-batches or more, 3 stages or fewer",
        ),
    ],
)
def test_impossible_schedules_are_refused_with_possible_ones(arguments, message):
    with pytest.raises(UserError) as error:
        build_schedule(*arguments)
    assert message in str(error.value)


@given(STAGES, MICRO_BATCHES)
def test_the_schedules_offered_in_the_message_work(stages, micro_batches):
    if micro_batches < 2 * stages - 1:
        with pytest.raises(UserError) as error:
            build_schedule("zb-h2", stages, micro_batches)
        assert f"give {2 * stages - 1} micro-batches" in str(error.value)
        fits = (micro_batches + 1) // 2
        assert f"{fits} stage" in str(error.value)
        build_schedule("zb-h2", stages, 2 * stages - 1), build_schedule("zb-h2", fits, micro_batches)


def test_operations_print_as_in_a_schedule_file():
    assert [str(Action("F", 3)), str(Action("W", 12, 1))] == ["F3", "W12.1"]
