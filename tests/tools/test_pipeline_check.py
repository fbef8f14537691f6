"""Schedules written by hand: deadlocks, leaked activations and repeated actions are refused, with a fix."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Action, Schedule
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.tools.simulate.check import check_schedule
from minidist.tools.simulate.schedule_text import format_schedule, parse_schedule
from minidist.validation import SCHEDULES
from tests.helpers.pipeline_reference import Deadlock, longest_paths


def error_of(text, **options):
    with pytest.raises(UserError) as error:
        check_schedule(parse_schedule(text, **options))
    return str(error.value)


def shuffled(made, seed, swaps):
    """A copy of the schedule in which some neighbouring actions are swapped."""
    orders, chance = [list(order) for order in made.orders], random.Random(seed)
    for _ in range(swaps):
        order = chance.choice(orders)
        i = chance.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
    return Schedule(made.kind, made.micro_batches, orders, made.num_chunks, made.placement)


def deadlocks(made):
    """Whether the reference method finds a deadlock."""
    try:
        longest_paths(made.orders, lambda *_: 1.0, placement=made.placement)
    except Deadlock:
        return True
    return False


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 12))
def test_exactly_the_orders_that_deadlock_are_refused(kind, stages, seed, swaps):
    made = shuffled(build_schedule(kind, stages, 2 * stages), seed, swaps)
    if deadlocks(made):
        with pytest.raises(UserError, match="the schedule deadlocks: stage "):
            check_schedule(made)
    else:
        assert len(check_schedule(made)) == stages


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(0, 10**6), st.integers(1, 6))
def test_the_proposed_change_removes_the_deadlock(kind, stages, seed, swaps):
    made = shuffled(build_schedule(kind, stages, 2 * stages), seed, swaps)
    if not deadlocks(made):
        return
    with pytest.raises(UserError) as error:
        check_schedule(made)
    change = re.search(r"Put (\S+) before (\S+) on stage (\d+)\.$", str(error.value))
    if change is None:  # no single move does
        assert str(error.value).endswith("begin with that.")
        return
    first, second = (action for (action,) in (parse_schedule(name).orders[0] for name in change.groups()[:2]))
    order = made.orders[int(change[3])]
    order.insert(order.index(second), order.pop(order.index(first)))
    check_schedule(made)


def test_a_cycle_of_waiting_stages_is_reported_stage_by_stage():
    assert error_of("F0 B0 F1 B1 \n F0 F1 B0 B1") == (
        "the schedule deadlocks: stage 0 waits at B0 (action 2 of 4) for stage 1's B0 (action 3); "
        "stage 1 waits at F1 (action 2 of 4) for stage 0's F1 (action 3). Put B0 before F1 on stage 1."
    )


def test_stages_that_only_wait_for_the_cycle_are_counted():
    told = error_of("F0 B0 F1 B1 \n F0 F1 B0 B1 \n F0 F1 B0 B1")
    assert "stage 0 waits at B0" in told and "stage 1 waits at F1" in told and "1 more waits for these" in told
    told = error_of("F0 F1 B0 B1 \n F0 B0 F1 B1 \n F0 F1 B0 B1")
    assert "stage 1 waits at B0" in told and "stage 2 waits at F1" in told and "1 more waits for these" in told
    assert "stage 0 waits" not in told


def test_a_stage_that_waits_for_itself_is_reported():
    assert error_of("W0 F0 B0") == (
        "the schedule deadlocks: stage 0 waits at W0 (action 1 of 3) for its own B0 (action 3). "
        "The order of gpipe or 1f1b runs: begin with that."
    )
    assert error_of("F0 W0 B0").endswith("for its own B0 (action 3). Put B0 before W0 on stage 0.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "F0 F1 B0 B1 \n F0 B0 F1",
            "stage 1 never runs B1 (the schedule is one of 2 micro-batches): the activation of F1 is never freed, and "
            "its gradient is missing. Add B1 to stage 1 after F1.",
        ),
        ("F0 F1 B0 B1 \n F0 B0", "stage 1 never runs F1 (and 1 more) (the schedule is one of 2 micro-batches): micro-"),
        (
            "F0 F1 B0 B1 W0 \n F0 B0 F1 B1 W0 W1",
            "stage 0 never runs W1 (the schedule is one of 2 micro-batches): the activation of F1 is never freed, and "
            "the gradient of its weights is missing. Add W1 to stage 0 after B1.",
        ),
        (
            "F0 B0 F999999999 B999999999",
            "never runs F1 (and 1999999995 more) (the schedule is one of 1000000000 micro-",
        ),
        ("F0 B0 W0 \n F0 W0", "the activation of F0 is never freed, and no gradient is passed on. Add B0 to stage 1"),
        (
            "F0 F1 B0 B1 B0",
            "stage 0 runs B0 2 times, as its actions 3 and 5 of 5: leave one of them.",
        ),
        (
            "F0 F0.1 B0.1 B0 \n F0 F0.1 B0.1",
            "stage 1 never runs B0 (the schedule is one of 1 micro-batch in 2 chunks)",
        ),
    ],
)
def test_missing_and_repeated_operations_are_named(text, message):
    assert message in error_of(text)


def test_an_operation_of_no_micro_batch_is_refused():
    made = Schedule("by hand", 1, [[Action("F", 0), Action("B", 0), Action("F", 1)]])
    with pytest.raises(UserError, match="stage 0 has F1, but the schedule is one of 1 micro-batch, counted from 0"):
        check_schedule(made)
    for order in ("F0 B0 X0", "F0 X0", "X0 B0"):
        with pytest.raises(UserError, match="stage 0 has X0"):
            check_schedule(Schedule("by hand", 1, [[Action(word[0], int(word[1])) for word in order.split()]]))


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(0, 10**6))
def test_leaving_out_or_repeating_any_operation_is_refused(kind, stages, seed):
    made = build_schedule(kind, stages, 2 * stages)
    orders, chance = [list(order) for order in made.orders], random.Random(seed)
    order = chance.choice(orders)
    action = chance.choice(order)
    if seed % 2:
        order.remove(action)
        message = f"never runs {action} "
    else:
        order.append(action)
        message = f"runs {action} 2 times"
    with pytest.raises(UserError) as error:
        check_schedule(Schedule(kind, made.micro_batches, orders, made.num_chunks, made.placement))
    assert message in str(error.value)


def test_the_right_number_of_operations_is_not_enough():
    assert "stage 0 runs F0 2 times, as its actions 1 and 2 of 4" in error_of("F0 F0 B0 B1")
    assert "stage 1 runs B1 2 times" in error_of("F0 F1 B0 B1 \n F0 B1 F1 B1")


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 3))
def test_a_schedule_is_equal_after_formatting_and_parsing(kind, stages, groups):
    made = build_schedule(kind, stages, stages * groups + stages)
    again = parse_schedule(format_schedule(made), kind, made.placement)
    assert [list(order) for order in made.orders] == again.orders
    assert (again.micro_batches, again.num_chunks) == (made.micro_batches, made.num_chunks)


def test_comments_and_empty_lines_are_ignored():
    assert parse_schedule("# mine\n\nF0 B0  # the first\n\nF0 B0\n").orders == [[Action("F", 0), Action("B", 0)]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.txt has no actions: write a line for each stage"),
        ("# nothing", "my.txt has no actions"),
        ("F0 B0\nF0 G0", "my.txt, line 2: 'G0' is no action; write F, B or W"),
        ("F0 B", "line 1: 'B' is no action"),
        ("F0. B0", "line 1: 'F0.' is no action"),
    ],
)
def test_an_invalid_operation_is_refused_with_its_line(text, message):
    with pytest.raises(UserError) as error:
        parse_schedule(text, "my.txt")
    assert message in str(error.value)
