"""Tests of one_f_one_b_schedule: the reference is autograd in one process, and a simulator that knows no schedule."""

from exercises.conditions import check_conditions
from exercises.pipeline import (
    declare_step,
    expect_each_operation_once,
    expect_messages,
    gradients_of_one_process,
    run_step,
    simulate_schedule,
)
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.comm import all_gather_object

# Samples of each micro-batch, by its number: unequal, and some numbers are left out.
SAMPLES = {0: 2, 1: 1, 3: 3, 4: 1, 7: 2, 8: 1, 9: 2}
CASE = "micro-batches 0, 1, 3, 4, 7, 8 and 9 of 2, 1, 3, 1, 2, 1 and 2 samples"


def first(number):
    """The first `number` micro-batches."""
    return {i: SAMPLES[i] for i in list(SAMPLES)[:number]}


def orders(answer, network, samples):
    """The actions of all stages in one step."""
    stage = run_step(answer.one_f_one_b_step, network.group, samples)
    return all_gather_object(stage.operations, network.group)


@test(points=4, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """The gradients of every stage are those of one process, for any number of micro-batches."""
    for number in (7, 4, 3, 2, 1, 0):
        stage = run_step(answer.one_f_one_b_step, network.group, first(number), is_transposed=number == 4)
        expected = gradients_of_one_process(world.size, first(number))[world.rank]
        case = f"{number} micro-batches" + ", transposed outputs" * (number == 4)
        for name, got, wanted in zip(("weight", "shift"), stage.gradients, expected, strict=True):
            expect(f"the gradient of the stage's {name}", got, wanted, tolerance=1e-12, case=case)


@test(points=3, ranks=(1, 3, 4))
def few_micro_batches_in_flight(answer, world, network):
    """Stage s of p has at most min(p - s, micro-batches) micro-batches in flight."""
    for number in (7, 2):
        found = orders(answer, network, first(number))
        expect_each_operation_once(found, list(first(number)))
        most = min(world.size - world.rank, number)
        got = simulate_schedule(found, 1.0, 1.0).peak_in_flight[world.rank]
        if got > most:
            case = f"stage {world.rank} of {world.size}, {number} micro-batches"
            raise Wrong("wrong", "peak number of micro-batches in flight", f"at most {most}", str(got), case=case)


@test(points=3, ranks=(2, 3, 4))
def as_fast_as_gpipe(answer, world, network):
    """A step takes the time of (micro-batches + stages - 1) forwards and as many backwards, as with GPipe."""
    for number in (7, 3, 1):
        found = orders(answer, network, first(number))
        for f, b in ((1.0, 1.0), (1.0, 2.0), (3.0, 1.0)):
            case = f"{world.size} stages, {number} micro-batches, a forward takes {f:g}, a backward {b:g}"
            expect(
                "the end of the step",
                simulate_schedule(found, f, b).end,
                (number + world.size - 1) * (f + b),
                case=case,
            )


@test(points=2, ranks=(2, 3))
def one_message_per_micro_batch(answer, world, network):
    """A stage sends each neighbour one message per micro-batch, and no other; every message has arrived at the end."""
    group, before = network.group, len(network.records)
    run_step(answer.one_f_one_b_step, group, SAMPLES)
    expect_messages(network, before, group, SAMPLES, CASE)


@test(points=2, ranks=(1, 2, 3))
def frees_activations(answer, world, network):
    """The tensors that a backward needed are freed before the next forward or backward."""
    stage = run_step(answer.one_f_one_b_step, network.group, SAMPLES)
    most = max(stage.kept.values())
    expect("micro-batches with saved tensors, at the most", most, world.size - world.rank, case=CASE)


DECLARATION = declare_step("one_f_one_b_step")


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, number of micro-batches and group, also one of only some ranks; calls are independent."""
    check_conditions(DECLARATION, answer, world, network)
