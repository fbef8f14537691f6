"""Tests of gradient_sum: the gradients are multiples of one small number, so that sums are exact in any order."""

import torch
from torch import nn

from exercises.conditions import check_conditions
from exercises.reducer_run import declare_reducer, grad_of, local_gradient
from exercises.testing import CONDITION_RANKS, expect, expect_raises, test
from minidist.parameters import named_parameters, replicated_specs

SHAPES = {"weight": (20, 3), "bias": (3,), "scale": ()}


class Net(nn.Module):
    """Parameters whose initial values differ by rank; only the last rank uses `rare`, none uses `never`."""

    def __init__(self, rank, dtype):
        super().__init__()
        for name, shape in {"rare": (2,), **SHAPES, "never": (2,), "frozen": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))
        self.frozen.requires_grad_(False)


def gradient(name, rank, step=0, dtype=torch.float32):
    return local_gradient(name, SHAPES[name], rank, step, dtype)


def reducer_of(answer, world, network, dtype=torch.float32):
    """Return the learner's reducer on this rank's model, and the parameters by name."""
    model = Net(world.rank, dtype)
    parameters = named_parameters(model)
    return answer.NaiveReducer(parameters, replicated_specs(model, network.group.ranks), [network.group]), parameters


def run_step(reducer, world, step=0, dtype=torch.float32):
    """Add this rank's gradients, in another order on every other rank, and call finish_reductions()."""
    for name in reversed(SHAPES) if world.rank % 2 else SHAPES:
        reducer.accumulate(name, gradient(name, world.rank, step, dtype))
        reducer.mark_ready(name)
    reducer.finish_reductions()


def total(name, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(gradient(name, rank, step, dtype) for rank in range(world.size))


@test(points=3, ranks=(1, 3, 4))
def sums_over_ranks(answer, world, network):
    """After finish_reductions() every rank has the sum of all ranks' gradients, in the dtype of the parameter."""
    for dtype in (torch.float32, torch.float64):
        reducer, parameters = reducer_of(answer, world, network, dtype)
        run_step(reducer, world, dtype=dtype)
        for name in SHAPES:
            expected = total(name, world, dtype=dtype).tolist()
            expect(f"the {str(dtype)[6:]} gradient of {name}", grad_of(parameters, name), expected)


@test(points=2, ranks=(2,))
def micro_batches_add_up(answer, world, network):
    """A gradient that comes in several parts, of which rank 0 has more than rank 1, is the sum of all of them."""
    reducer, parameters = reducer_of(answer, world, network)
    parts = {rank: 3 - rank for rank in range(world.size)}
    for name in SHAPES:
        for part in range(parts[world.rank]):
            reducer.accumulate(name, gradient(name, world.rank, part))
        reducer.mark_ready(name)
    reducer.finish_reductions()
    for name in SHAPES:
        expected = sum(gradient(name, rank, part) for rank, count in parts.items() for part in range(count))
        expect(f"the gradient of {name}, of 3 and 2 micro-batches", grad_of(parameters, name), expected.tolist())


@test(points=2, ranks=(2,))
def steps_are_independent(answer, world, network):
    """A step contains nothing of the steps before it: not of a complete one, an aborted one, or another reducer's."""
    reducer, parameters = reducer_of(answer, world, network)
    other, others_parameters = reducer_of(answer, world, network)
    for step in range(3):
        if step == 1:  # aborted before finish_reductions()
            reducer.accumulate("weight", gradient("weight", world.rank))
            other.accumulate("weight", gradient("weight", world.rank, 7))
        else:
            run_step(reducer, world, step)
            for name in SHAPES:
                what = f"the gradient of {name} in step {step + 1}"
                expect(what, grad_of(parameters, name), total(name, world, step).tolist())
        reducer.clear_gradients()
        left = [name for name in parameters if parameters[name].grad is not None]
        expect("parameters with a .grad after clear_gradients()", left, [])
    other.finish_reductions()
    expected = total("weight", world, 7).tolist()
    expect("the gradient of a second reducer's weight", grad_of(others_parameters, "weight"), expected)


@test(points=3, ranks=(2,))
def unused_parameters(answer, world, network):
    """A parameter that one rank used gets its gradient on all ranks, also zeros; one that no rank used keeps None."""
    reducer, parameters = reducer_of(answer, world, network)
    for step, values in enumerate(([3.0, 4.0], [0.0, 0.0], [5.0, 6.0])):
        user = (world.size - 1 + step) % world.size  # another rank in each step
        if world.rank == user:
            reducer.accumulate("rare", torch.tensor(values))
        run_step(reducer, world, step)
        what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
        expect(what, grad_of(parameters, "rare"), values)
        expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
        reducer.clear_gradients()
    run_step(reducer, world)
    expect("the gradient of a parameter used in earlier steps only", grad_of(parameters, "rare"), None)


@test(points=1)
def gradients_after_ready_are_refused(answer, world, network):
    """accumulate() raises RuntimeError after mark_ready() of the same parameter, until clear_gradients()."""
    reducer, parameters = reducer_of(answer, world, network)
    for _ in range(2):
        reducer.accumulate("bias", gradient("bias", 0))
        reducer.mark_ready("bias")
        reducer.accumulate("weight", gradient("weight", 0))
        expect_raises(RuntimeError, reducer.accumulate, "bias", gradient("bias", 0))
        reducer.clear_gradients()


@test(points=2, ranks=(2,))
def parameters_are_not_changed(answer, world, network):
    """The reducer changes gradients, never parameters, and those of no frozen parameter."""
    reducer, parameters = reducer_of(answer, world, network)
    run_step(reducer, world)
    for name, shape in SHAPES.items():
        expect(f"the gradient of {name}", grad_of(parameters, name), total(name, world).tolist())
        expect(f"the parameter {name}", parameters[name], torch.full(shape, 0.5 + world.rank))
    expect("the gradient of a frozen parameter", grad_of(parameters, "frozen"), None)


@test(points=3, ranks=(2,))
def nothing_more_is_sent(answer, world, network):
    """Each gradient is all-reduced once, with at most one more message of 16 bytes or less per parameter."""
    reducer, parameters = reducer_of(answer, world, network)
    reducer.accumulate("weight", gradient("weight", world.rank))
    expect("messages before finish_reductions()", len(network.records), 0)
    reducer.clear_gradients()
    run_step(reducer, world)
    names = sorted({record.name for record in network.records})
    expect("the operations sent", names, ["all_reduce"])
    payload = sum(record.payload_bytes for record in network.records)
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    least = sum(parameters[name].numel() * 4 for name in SHAPES)  # nothing need be sent of an unused parameter
    most = sum(parameter.numel() * 4 for parameter in trainable) + 16 * len(trainable)
    expect(f"between {least} and {most} bytes reduced (counted: {payload})", least <= payload <= most, True)
    count, enough = len(network.records), 2 * len(trainable)
    expect(f"at most {enough} messages for {len(trainable)} parameters (counted: {count})", count <= enough, True)


def make_reducer(answer, parameters, specs, groups):
    return answer.NaiveReducer(parameters, specs, groups)


DECLARATION = declare_reducer(make_reducer)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype and size, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
