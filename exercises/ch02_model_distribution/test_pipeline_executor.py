"""Tests of pipeline_executor: the reference is autograd in one process, in float64; schedules are the tests' own."""

from itertools import accumulate, product

import torch

from exercises.conditions import check_conditions
from exercises.pipeline import (
    Stage,
    declare_executor,
    expect_messages,
    gpipe_actions,
    gradients_of_one_process,
    make_executor,
    one_f_one_b_actions,
    operation_names,
    run_executor,
)
from exercises.testing import CONDITION_RANKS, Wrong, expect, test

# Samples of each micro-batch, by its number: unequal, and micro-batches 2, 5 and 6 of the schedule are skipped.
SAMPLES = {0: 2, 1: 1, 3: 3, 4: 1, 7: 2, 8: 1, 9: 2}
NUMBERS = range(10)
SKIP = {2, 5, 6}
CASE = "10 micro-batches, of which 2, 5 and 6 are skipped"


def both_groups(network):
    """The groups for hidden states and for their gradients."""
    return network.group, network.second_group


def schedules(world, numbers=NUMBERS):
    """The actions of this rank's stage, by the name of the schedule."""
    return {
        "GPipe": gpipe_actions(numbers),
        "1F1B": one_f_one_b_actions(numbers, world.size - world.rank),
    }


def with_weights(actions):
    """The actions with a W right after the B that follows each B, as in the course's split backward."""
    result, waiting = [], []
    for kind, i in actions:
        result.append((kind, i))
        if kind == "B":
            result, waiting = result + waiting, [("W", i)]
    return result + waiting


def count_in_flight(actions):
    """The number of micro-batches in flight at each end of a backward, and the largest number."""
    kinds = [kind for kind, i in actions if i in SAMPLES]
    end = "W" if "W" in kinds else "B"
    numbers = list(accumulate((kind == "F") - (kind == end) for kind in kinds))
    return [number for kind, number in zip(kinds, numbers, strict=True) if kind == end], max(numbers)


def in_flight_at_the_end_of(actions):
    """The micro-batches in flight after each backward."""
    result, numbers = [], set()
    for kind, i in actions:
        if i in SAMPLES:
            (numbers.add if kind == "F" else numbers.remove)(i)
            result += [sorted(numbers)] * (kind == "B")
    return result


def expect_gradients(got, stage, world, samples, times=1, case=CASE):
    wanted = gradients_of_one_process(world.size, samples)[world.rank]
    for name, gradient, expected in zip(stage.parameters, got, wanted, strict=True):
        expected = None if expected is None else times * expected
        expect(f"the gradient of the stage's {name}", gradient, expected, tolerance=1e-12, case=case)


@test(points=5, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """The gradients of every stage are those of one process, for any schedule and any number of micro-batches."""
    for number in (1, 2, 5, 10):
        samples = {i: n for i, n in SAMPLES.items() if i < number}
        own_schedules = schedules(world, range(number))
        # Stage 0 starts all its forwards while stage 1 waits for the first stage to receive a gradient.
        own_schedules["GPipe on stage 0, 1F1B on the others"] = own_schedules["1F1B" if world.rank else "GPipe"]
        for name, actions in own_schedules.items():
            is_transposed = number == 5
            stage = run_executor(answer, both_groups(network), actions, samples, is_transposed=is_transposed)
            case = f"{name}, {len(samples)} of {number} micro-batches" + ", transposed outputs" * is_transposed
            expect_gradients(stage.gradients, stage, world, samples, case=case)


@test(points=3, ranks=(1, 3))
def runs_the_actions_in_order(answer, world, network):
    """Any schedule runs in its order; `on_backward_done` follows each backward, and `peak_in_flight` is counted."""
    own = [("F", 3), ("F", 2), ("F", 0), ("B", 0), ("B", 3), ("F", 1), ("B", 1)]
    for name, actions, peak in (
        ("GPipe", schedules(world)["GPipe"], len(SAMPLES)),
        ("1F1B", schedules(world)["1F1B"], world.size - world.rank),
        (f"the schedule {operation_names(own)} without micro-batch 2", own, 2),
    ):
        stage = Stage(world.rank, world.size, SAMPLES)
        executor = make_executor(answer, both_groups(network), stage, actions)
        in_flight = []

        def done(stage=stage, executor=executor, in_flight=in_flight):
            stage.operations.append(("done", 0))
            in_flight.append(sorted(executor.in_flight))

        executor.run(stage.run, stage.empty_hidden, SKIP, done)
        wanted = in_flight_at_the_end_of(actions)
        expect("the keys of `in_flight` at each call of on_backward_done", in_flight, wanted, case=name)
        wanted = [action for action in actions if action[1] in SAMPLES]
        wanted = [each for action in wanted for each in ([action, ("done", 0)] if action[0] == "B" else [action])]
        what = "actions, with done0 for each call of on_backward_done"
        expect(what, operation_names(stage.operations), operation_names(wanted), case=name)
        expect("peak_in_flight", executor.peak_in_flight, peak, case=name)


@test(points=3, ranks=(2, 3))
def one_message_per_micro_batch(answer, world, network):
    """One message per micro-batch and neighbour, in the group of its kind, all complete at the end."""
    groups = both_groups(network)
    split = {f"{name} with a split backward": with_weights(each) for name, each in schedules(world).items()}
    for name, actions in (schedules(world) | split).items():
        case, before = f"{name}, {CASE}", len(network.records)
        run_executor(answer, groups, actions, SAMPLES, is_transposed=True, is_split=name in split)
        expect_messages(network, before, groups, actions, SAMPLES, case)
        for record in network.records[before:]:
            is_hidden = (record.peer > world.rank) == (record.name == "send")
            wanted, what = groups[not is_hidden].name, "hidden states" if is_hidden else "gradients"
            got = record.group_name.removeprefix("world: ")
            expect(f"the group in which {what} are sent", got, wanted, case=case)


@test(points=3, ranks=(2, 3))
def finishes_sends_in_time(answer, world, network):
    """When a micro-batch's backward is done, its activation has arrived, and one gradient at most is in flight."""
    own = [("F", 3), ("F", 2), ("F", 0), ("B", 0), ("F", 1), ("F", 4), ("B", 1), ("B", 3), ("B", 4)]
    for name, actions in (schedules(world) | {"another order": own}).items():
        stage, before = Stage(world.rank, world.size, SAMPLES), len(network.records)

        def check_sends(name=name, stage=stage, before=before):
            case = f"{name}, stage {world.rank} of {world.size}, after {operation_names(stage.operations)}"
            sent = [each for each in network.records[before:] if each.name == "send"]
            # A stage sends its outputs in the order of its forwards.
            order = [i for kind, i in stage.operations if kind == "F"]
            sends = zip(order, [each for each in sent if each.peer == world.rank + 1], strict=False)
            left = [i for i, each in sends if each.waited is None and ("B", i) in stage.operations]
            what = "finished micro-batches for whose send of hidden states your code has not waited"
            expect(what, left, [], case=case)
            left = [each for each in sent if each.peer == world.rank - 1 and each.waited is None]
            if len(left) > 1:
                what = "sends of gradients that your code has not waited for"
                raise Wrong("wrong", what, "at most 1", str(len(left)), case=case)

        executor = make_executor(answer, both_groups(network), stage, actions)
        executor.run(stage.run, stage.empty_hidden, SKIP, check_sends)
        check_sends()
        wanted = sum(kind == "B" and i in SAMPLES for kind, i in actions)
        expect("backwards", sum(kind == "B" for kind, _ in stage.operations), wanted, case=f"{name}, {CASE}")


@test(points=2, ranks=(1, 2, 3))
def frees_activations(answer, world, network):
    """A backward frees the tensors that it needed, and nothing references hidden and out in `on_backward_done`."""
    stage = run_executor(answer, both_groups(network), schedules(world)["GPipe"], SAMPLES)
    expected = list(range(len(SAMPLES), 0, -1))
    kept = list(stage.kept.values())
    expect("micro-batches with saved tensors, at each backward of GPipe", kept, expected, case=CASE)
    stage = run_executor(answer, both_groups(network), schedules(world)["1F1B"], SAMPLES)
    most = max(stage.kept.values())
    expect("micro-batches with saved tensors, at the most, in 1F1B", most, world.size - world.rank, case=CASE)
    split = {f"{name} with a split backward": with_weights(each) for name, each in schedules(world).items()}
    for name, actions in (schedules(world) | split).items():
        stage = run_executor(answer, both_groups(network), actions, SAMPLES, is_split=name in split)
        wanted, _ = count_in_flight(actions)
        what = "micro-batches whose hidden or out is referenced, at each call of on_backward_done"
        expect(what, stage.referenced, wanted, case=f"{name}, {CASE}")


@test(points=2, ranks=(1, 3))
def forward_alone(answer, world, network):
    """`run_forward` gives the outputs of one process and keeps nothing; training goes on afterwards."""
    stage, groups = Stage(world.rank, world.size, SAMPLES), both_groups(network)
    executor = make_executor(answer, groups, stage, schedules(world)["1F1B"])
    case, forwards = "two evaluations of 2 micro-batches", [("F", 0), ("F", 1)]
    for _ in range(2):
        before = len(network.records)
        executor.run_forward(stage.run, stage.empty_hidden, 2)
        expect_messages(network, before, groups, forwards, SAMPLES, case)
    expect("the actions", operation_names(stage.operations), "F0 F1 F0 F1", case=case)
    outputs = {0: None, 1: None}
    with torch.no_grad():
        for i in outputs:
            for number in range(world.rank + 1):
                outputs[i] = Stage(number, world.size, SAMPLES).run(i, outputs[i])
    for i, wanted in outputs.items():
        expect(f"the output of micro-batch {i}", stage.outputs[i], wanted, tolerance=1e-12, case=case)
    expect("peak_in_flight", executor.peak_in_flight, 0, case=case)
    executor.run(stage.run, stage.empty_hidden, SKIP)
    expect_gradients(stage.gradients, stage, world, SAMPLES, case="1F1B after two evaluations")
    case, peak = "an evaluation after 1F1B", world.size - world.rank
    executor.run_forward(stage.run, stage.empty_hidden, 2)
    expect("peak_in_flight", executor.peak_in_flight, peak, case=case)
    executor.run(stage.run, stage.empty_hidden, SKIP)
    expect_gradients(stage.gradients, stage, world, SAMPLES, times=2, case="1F1B twice, with an evaluation in between")


@test(points=2, ranks=(1, 3))
def weight_gradients_of_a_split_backward(answer, world, network):
    """In a schedule with W, B computes the gradient of the input only, and W passes those of weights to `add`."""
    equal = dict.fromkeys(SAMPLES, 2)  # then all gradients have one shape
    for samples, (name, actions) in product((SAMPLES, equal), schedules(world).items()):
        actions, case = with_weights(actions), f"{name} with a split backward, {CASE}, samples {[*samples.values()]}"
        stage = Stage(world.rank, world.size, samples, is_split=True)
        executor, done = make_executor(answer, both_groups(network), stage, actions), []
        executor.run(stage.run, stage.empty_hidden, SKIP, lambda s=stage, d=done: d.append(s.number_added))
        have_grad = [each is not None for each in stage.gradients]
        expect("which parameters have a .grad", have_grad, [False, False], case=case)
        expect_gradients([stage.added.get(key) for key in stage.parameters], stage, world, samples, case=case)
        wanted = [2 * (number + 1) for number in range(len(samples))]
        expect("gradients that `add` has got, at each call of on_backward_done", done, wanted, case=case)


@test(points=2, ranks=(1, 3))
def second_run(answer, world, network):
    """A second run adds its gradients to the first's; one that skips everything changes nothing, nor the peak."""
    for name, actions in schedules(world).items():
        stage = Stage(world.rank, world.size, SAMPLES)
        executor = make_executor(answer, both_groups(network), stage, actions)
        _, peak = count_in_flight(actions)
        for skip in (SKIP, set(NUMBERS), SKIP):
            executor.run(stage.run, stage.empty_hidden, skip)
            case = f"{name}, 10 micro-batches, after a run that skips {sorted(skip)}"
            expect("peak_in_flight", executor.peak_in_flight, peak, case=case)
        expect_gradients(stage.gradients, stage, world, SAMPLES, times=2, case=f"{name}, two steps, one of them twice")


DECLARATION = declare_executor()


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, number of micro-batches and group, also one of only some ranks; calls are independent."""
    check_conditions(DECLARATION, answer, world, network)
