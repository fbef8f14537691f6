"""Schedules written by hand: what deadlocks, leaks or does something twice is refused, with a change that mends it."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.errors import UserError
from minidist.parallel.pipeline.actions import Op, Schedule
from minidist.parallel.pipeline.check import check_schedule
from minidist.parallel.pipeline.schedules import KINDS, build_schedule
from minidist.tools.simulate.schedule_text import format_schedule, parse_schedule
from tests.helpers.pipeline_reference import Deadlock, longest_paths


def refused(text, **options):
    with pytest.raises(UserError) as error:
        check_schedule(parse_schedule(text, **options))
    return str(error.value)


def shuffled(made, seed, swaps):
    """A schedule with some neighbours in its orders exchanged."""
    orders, chance = [list(order) for order in made.orders], random.Random(seed)
    for _ in range(swaps):
        order = chance.choice(orders)
        i = chance.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
    return Schedule(made.kind, made.micro_batches, orders, made.chunks, made.placement)


def deadlocks(made):
    """What the second method finds."""
    try:
        longest_paths(made.orders, lambda *_: 1.0, placement=made.placement)
    except Deadlock:
        return True
    return False


@given(st.sampled_from(list(KINDS)), st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 12))
def test_it_refuses_exactly_the_orders_that_deadlock(kind, stages, seed, swaps):
    made = shuffled(build_schedule(kind, stages, 2 * stages), seed, swaps)
    if deadlocks(made):
        with pytest.raises(UserError, match="the schedule deadlocks: stage "):
            check_schedule(made)
    else:
        assert len(check_schedule(made)) == stages


@given(st.sampled_from(list(KINDS)), st.integers(1, 4), st.integers(0, 10**6), st.integers(1, 6))
def test_the_change_it_proposes_mends_the_deadlock(kind, stages, seed, swaps):
    made = shuffled(build_schedule(kind, stages, 2 * stages), seed, swaps)
    if not deadlocks(made):
        return
    with pytest.raises(UserError) as error:
        check_schedule(made)
    change = re.search(r"Put (\S+) before (\S+) on stage (\d+)\.$", str(error.value))
    if change is None:  # no single move does
        assert str(error.value).endswith("begin with that.")
        return
    first, second = (op for (op,) in (parse_schedule(name).orders[0] for name in change.groups()[:2]))
    order = made.orders[int(change[3])]
    order.insert(order.index(second), order.pop(order.index(first)))
    check_schedule(made)


def test_a_circle_of_stages_is_reported_stage_by_stage():
    assert refused("F0 B0 F1 B1 \n F0 F1 B0 B1") == (
        "the schedule deadlocks: stage 0 waits at B0 (operation 2 of 4) for stage 1's B0 (operation 3); "
        "stage 1 waits at F1 (operation 2 of 4) for stage 0's F1 (operation 3). Put B0 before F1 on stage 1."
    )


def test_stages_that_only_wait_for_the_circle_are_counted():
    told = refused("F0 B0 F1 B1 \n F0 F1 B0 B1 \n F0 F1 B0 B1")
    assert "stage 0 waits at B0" in told and "stage 1 waits at F1" in told and "1 more waits for these" in told
    told = refused("F0 F1 B0 B1 \n F0 B0 F1 B1 \n F0 F1 B0 B1")
    assert "stage 1 waits at B0" in told and "stage 2 waits at F1" in told and "1 more waits for these" in told
    assert "stage 0 waits" not in told


def test_a_stage_that_waits_for_itself():
    assert refused("W0 F0 B0") == (
        "the schedule deadlocks: stage 0 waits at W0 (operation 1 of 3) for its own B0 (operation 3). "
        "The order of gpipe or 1f1b runs: begin with that."
    )
    assert refused("F0 W0 B0").endswith("for its own B0 (operation 3). Put B0 before W0 on stage 0.")


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
            "stage 0 runs B0 2 times, as its operations 3 and 5 of 5: leave one of them.",
        ),
        (
            "F0 F0.1 B0.1 B0 \n F0 F0.1 B0.1",
            "stage 1 never runs B0 (the schedule is one of 1 micro-batches in 2 chunks)",
        ),
    ],
)
def test_what_is_missing_or_too_many_is_named(text, message):
    assert message in refused(text)


def test_an_operation_of_no_micro_batch_is_refused():
    made = Schedule("by hand", 1, [[Op("F", 0), Op("B", 0), Op("F", 1)]])
    with pytest.raises(UserError, match="stage 0 has F1, but the schedule is one of 1 micro-batches, counted from 0"):
        check_schedule(made)
    for order in ("F0 B0 X0", "F0 X0", "X0 B0"):
        with pytest.raises(UserError, match="stage 0 has X0"):
            check_schedule(Schedule("by hand", 1, [[Op(word[0], int(word[1])) for word in order.split()]]))


@given(st.sampled_from(list(KINDS)), st.integers(1, 4), st.integers(0, 10**6))
def test_leaving_out_or_repeating_any_operation_is_refused(kind, stages, seed):
    made = build_schedule(kind, stages, 2 * stages)
    orders, chance = [list(order) for order in made.orders], random.Random(seed)
    order = chance.choice(orders)
    op = chance.choice(order)
    if seed % 2:
        order.remove(op)
        message = f"never runs {op} "
    else:
        order.append(op)
        message = f"runs {op} 2 times"
    with pytest.raises(UserError) as error:
        check_schedule(Schedule(kind, made.micro_batches, orders, made.chunks, made.placement))
    assert message in str(error.value)


def test_as_many_operations_as_there_are_to_be_are_not_enough():
    assert "stage 0 runs F0 2 times, as its operations 1 and 2 of 4" in refused("F0 F0 B0 B1")
    assert "stage 1 runs B1 2 times" in refused("F0 F1 B0 B1 \n F0 B1 F1 B1")


@given(st.sampled_from(list(KINDS)), st.integers(1, 4), st.integers(1, 3))
def test_a_schedule_survives_being_written_and_read(kind, stages, groups):
    made = build_schedule(kind, stages, stages * groups + stages)
    again = parse_schedule(format_schedule(made), kind, made.placement)
    assert [list(order) for order in made.orders] == again.orders
    assert (again.micro_batches, again.chunks) == (made.micro_batches, made.chunks)


def test_comments_and_empty_lines_are_passed_over():
    assert parse_schedule("# mine\n\nF0 B0  # the first\n\nF0 B0\n").orders == [[Op("F", 0), Op("B", 0)]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.txt has no operations: write a line for each stage"),
        ("# nothing", "my.txt has no operations"),
        ("F0 B0\nF0 G0", "my.txt, line 2: 'G0' is no operation; write F, B or W"),
        ("F0 B", "line 1: 'B' is no operation"),
        ("F0. B0", "line 1: 'F0.' is no operation"),
    ],
)
def test_a_word_that_is_no_operation_is_refused_with_its_line(text, message):
    with pytest.raises(UserError) as error:
        parse_schedule(text, "my.txt")
    assert message in str(error.value)
