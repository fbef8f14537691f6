"""Tests of gpipe_schedule: the reference is autograd in one process, in float64."""

from exercises.conditions import check_conditions
from exercises.pipeline import (
    Stage,
    declare_step,
    expect_messages,
    gradients_of_one_process,
    operation_names,
    run_step,
)
from exercises.testing import CONDITION_RANKS, expect, test

# Samples of each micro-batch, by its number: unequal, and some numbers are left out.
SAMPLES = {0: 2, 1: 1, 3: 3, 4: 1, 7: 2}
CASE = "micro-batches 0, 1, 3, 4 and 7 of 2, 1, 3, 1 and 2 samples"


@test(points=4, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """The gradients of every stage are those of one process, also if a stage's outputs are not contiguous."""
    for is_transposed in (False, True):
        stage = run_step(answer.gpipe_step, network.group, SAMPLES, is_transposed=is_transposed)
        case = CASE + ", transposed outputs" * is_transposed
        for name, got, wanted in zip(
            ("weight", "shift"), stage.gradients, gradients_of_one_process(world.size, SAMPLES)[world.rank], strict=True
        ):
            expect(f"the gradient of the stage's {name}", got, wanted, tolerance=1e-12, case=case)


@test(points=2, ranks=(1, 3))
def gradients_accumulate(answer, world, network):
    """A second step adds its gradients to those of the first; a step without micro-batches changes nothing."""
    stage = Stage(world.rank, world.size, SAMPLES)
    for micro_batches in ([0, 1, 3], [], [4, 7]):
        answer.gpipe_step(stage.run, stage.empty_hidden, micro_batches, network.group)
    expected = gradients_of_one_process(world.size, SAMPLES)[world.rank]
    case = "steps of micro-batches [0, 1, 3], [] and [4, 7]"
    expect("the gradient of the stage's weight", stage.weight.grad, expected[0], tolerance=1e-12, case=case)


@test(points=3, ranks=(1, 3))
def all_forwards_first(answer, world, network):
    """Every stage runs all forwards, in the given order, and then all backwards."""
    stage = run_step(answer.gpipe_step, network.group, SAMPLES)
    forwards = [name for name in stage.operations[: len(SAMPLES)] if name[0] == "F"]
    expect("the first actions", operation_names(forwards), operation_names([("F", i) for i in SAMPLES]), case=CASE)
    backwards = sorted(stage.operations[len(SAMPLES) :])
    expect("the other actions", operation_names(backwards), operation_names([("B", i) for i in SAMPLES]), case=CASE)


@test(points=2, ranks=(2, 3))
def one_message_per_micro_batch(answer, world, network):
    """A stage sends each neighbour one message per micro-batch, and no other; every message has arrived at the end."""
    group, before = network.group, len(network.records)
    run_step(answer.gpipe_step, group, SAMPLES)
    expect_messages(network, before, group, SAMPLES, CASE)


@test(points=2, ranks=(1, 2))
def frees_activations(answer, world, network):
    """When a micro-batch's backward begins, the tensors that earlier backwards needed are freed."""
    stage = run_step(answer.gpipe_step, network.group, SAMPLES)
    expected = list(range(len(SAMPLES), 0, -1))
    expect("micro-batches with saved tensors, at each backward", list(stage.kept.values()), expected, case=CASE)


DECLARATION = declare_step("gpipe_step")


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, number of micro-batches and group, also one of only some ranks; calls are independent."""
    check_conditions(DECLARATION, answer, world, network)
