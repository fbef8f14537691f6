"""Sends and receives of a pipeline: programs made from a timeline never deadlock, even if sends are synchronous."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Action, StageAction
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.parallel.pipeline.transfers import Transfer, build_stage_programs, insert_transfers
from minidist.tools.simulate.check import check_rendezvous
from minidist.tools.simulate.timeline import StageTimes, simulate_schedule
from minidist.validation import SCHEDULES

TIME = st.integers(0, 8).map(lambda quarters: quarters / 4)


def insert_blocking_transfers(made):
    """Put each receive right before the operation that needs it, and each send right after its operation."""
    programs = []
    for stage, order in enumerate(made.orders):
        program = []
        for action in order:
            program += [
                Transfer("recv", need.stage, need) for need in made.dependencies(stage, action) if need.stage != stage
            ]
            program.append(action)
            if (consumer := made.consumer(stage, action)) and consumer.stage != stage:
                program.append(Transfer("send", consumer.stage, StageAction(stage, action)))
        programs.append(program)
    return programs


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.lists(TIME, min_size=4, max_size=4))
def test_programs_made_from_any_timeline_do_not_deadlock(kind, stages, times):
    made = build_schedule(kind, stages, 2 * stages)
    programs = insert_transfers(made, simulate_schedule(made, StageTimes(1.0 + times[0], *times[1:])).spans)
    check_rendezvous(made, programs)
    assert [[step for step in program if isinstance(step, Action)] for program in programs] == [*map(list, made.orders)]


def test_a_transfer_follows_operations_that_started_before_it():
    """The middle stage, F taking 1, B 2, a transfer 0.5: F0 runs from 1.5 to 2.5, and at 2 stage 0 has ended F1."""
    made = build_schedule("1f1b", 3, 4)
    program = insert_transfers(made, simulate_schedule(made, StageTimes(1.0, 1.0, 1.0, 0.5)).spans)[1]
    assert " | ".join(map(str, program[:10])) == (
        "recv F0 from stage 0 | F0 | recv F1 from stage 0 | send F0 to stage 2 | F1 | recv F2 from stage 0 | "
        "send F1 to stage 2 | recv B0 from stage 2 | B0 | send B0 to stage 0"
    )


@given(st.sampled_from(SCHEDULES), st.integers(2, 4))
def test_sends_and_receives_are_in_the_same_order(kind, stages):
    programs = build_stage_programs(build_schedule(kind, stages, 2 * stages))
    for a in range(stages):
        for b in range(stages):
            sent = [s.result_of for s in programs[a] if isinstance(s, Transfer) and (s.kind, s.peer) == ("send", b)]
            got = [s.result_of for s in programs[b] if isinstance(s, Transfer) and (s.kind, s.peer) == ("recv", a)]
            assert sent == got and all(place.stage == a for place in sent)


@pytest.mark.parametrize(("kind", "edges"), [("1f1b", 3 * 2), ("interleaved", 7 * 2), ("zb-v", 6 * 2)])
def test_one_transfer_per_edge_between_stages_and_none_within_a_stage(kind, edges):
    """4 stages have 3 edges; 8 parts in a loop 7; in a V 6, as parts 3 and 4 are on one stage. Times 2: F and B."""
    programs = build_stage_programs(build_schedule(kind, 4, 8))
    transfers = [step for program in programs for step in program if isinstance(step, Transfer)]
    assert (
        len([t for t in transfers if t.kind == "send"]) == len([t for t in transfers if t.kind == "recv"]) == edges * 8
    )


def test_1f1b_deadlocks_with_blocking_sends_after_each_operation():
    made = build_schedule("1f1b", 2, 4)
    with pytest.raises(UserError) as error:
        check_rendezvous(made, insert_blocking_transfers(made))
    assert str(error.value).startswith(
        "the transfers deadlock: stage 0 waits in send F1 to stage 1; stage 1 waits in send B0 to stage 0. "
    )


def test_gpipe_does_not_deadlock_with_blocking_sends():
    made = build_schedule("gpipe", 3, 4)
    check_rendezvous(made, insert_blocking_transfers(made))


def test_using_an_activation_before_its_receive_is_refused():
    made = build_schedule("gpipe", 2, 1)
    programs = insert_blocking_transfers(made)
    del programs[1][0], programs[0][1]  # the transfer of F0
    with pytest.raises(UserError, match="stage 1 runs F0 before it has received F0 of stage 0: put that first"):
        check_rendezvous(made, programs)


def test_sending_a_result_before_it_is_computed_is_refused():
    made = build_schedule("gpipe", 2, 1)
    programs = insert_blocking_transfers(made)
    programs[0][0], programs[0][1] = programs[0][1], programs[0][0]
    with pytest.raises(UserError, match="stage 0 sends it before it has run F0 of stage 0"):
        check_rendezvous(made, programs)


def test_a_send_that_nobody_receives_is_a_deadlock():
    made = build_schedule("gpipe", 2, 1)
    programs = insert_blocking_transfers(made)
    del programs[0][2]  # stage 0 does not receive the gradient
    with pytest.raises(UserError, match="stage 1 waits in send B0 to stage 0|stage 0 runs B0 before it has received"):
        check_rendezvous(made, programs)


def test_transfers_print_readably():
    place = StageAction(0, Action("F", 2))
    assert [str(Transfer("send", 1, place)), str(Transfer("recv", 0, place))] == [
        "send F2 to stage 1",
        "recv F2 from stage 0",
    ]
