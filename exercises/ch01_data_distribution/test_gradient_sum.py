"""Tests of gradient_sum: the gradients are multiples of one small number, so that sums are exact in any order."""

import torch
from torch import nn

from exercises.testing import expect, test
from minidist.parameters import named_parameters, replicated_specs

SHAPES = {"weight": (20, 3), "bias": (3,), "scale": ()}


class Net(nn.Module):
    """Parameters whose initial values differ by rank; only the last rank uses `rare`, none uses `never`."""

    def __init__(self, rank, dtype):
        super().__init__()
        for name, shape in {**SHAPES, "rare": (2,), "never": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))


def gradient(name, rank, step=0, dtype=torch.float32):
    """Return the local gradient of one rank: values that differ by rank, parameter, element and step.

    They are whole in float32; in float64 they have a part that float32 has no room for.
    """
    shape = SHAPES[name]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    return numbers + 10 * rank + 100 * step + len(name) + (2.0**-40 if dtype == torch.float64 else 0)


def reducer_of(answer, world, network, dtype=torch.float32):
    """Return the learner's reducer on this rank's model, and the parameters by name."""
    model = Net(world.rank, dtype)
    parameters = named_parameters(model)
    return answer.NaiveReducer(parameters, replicated_specs(model, network.group.ranks), [network.group]), parameters


def run_step(reducer, world, step=0, dtype=torch.float32):
    """Add this rank's gradients and call finish_reductions()."""
    for name in SHAPES:
        reducer.accumulate(name, gradient(name, world.rank, step, dtype))
        reducer.mark_ready(name)
    reducer.finish_reductions()


def total(name, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(gradient(name, rank, step, dtype) for rank in range(world.size))


def grad_of(parameters, name):
    """Return the gradient as nested lists, or None."""
    return None if parameters[name].grad is None else parameters[name].grad.tolist()


@test(points=4, ranks=(1, 4))
def sums_over_ranks(answer, world, network):
    """After finish_reductions() every rank has the sum of all ranks' gradients, in the dtype of the parameter."""
    for dtype in (torch.float32, torch.float64):
        reducer, parameters = reducer_of(answer, world, network, dtype)
        run_step(reducer, world, dtype=dtype)
        for name in SHAPES:
            expected = total(name, world, dtype=dtype).tolist()
            expect(f"the {str(dtype)[6:]} gradient of {name}", grad_of(parameters, name), expected)


@test(points=2, ranks=(2,))
def steps_are_independent(answer, world, network):
    """The gradient of the second step does not contain that of the first."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(2):
        run_step(reducer, world, step)
    for name in SHAPES:
        expected = total(name, world, 1).tolist()
        expect(f"the gradient of {name} in step 2", grad_of(parameters, name), expected)


@test(points=3, ranks=(2,))
def unused_parameters(answer, world, network):
    """A parameter that one rank used gets its gradient on all ranks; one that no rank used keeps None."""
    reducer, parameters = reducer_of(answer, world, network)
    if world.rank == world.size - 1:
        reducer.accumulate("rare", torch.tensor([3.0, 4.0]))
    run_step(reducer, world)
    expect("the gradient of a parameter that only the last rank used", grad_of(parameters, "rare"), [3.0, 4.0])
    expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)


@test(points=2, ranks=(2,))
def parameters_are_not_changed(answer, world, network):
    """The reducer changes gradients, never parameters."""
    reducer, parameters = reducer_of(answer, world, network)
    run_step(reducer, world)
    for name, shape in SHAPES.items():
        expect(f"the gradient of {name}", grad_of(parameters, name), total(name, world).tolist())
        expect(f"the parameter {name}", parameters[name], torch.full(shape, 0.5 + world.rank))


@test(points=3, ranks=(2,))
def nothing_more_is_sent(answer, world, network):
    """Each gradient is all-reduced once, with at most one more message of 16 bytes or less per parameter."""
    reducer, parameters = reducer_of(answer, world, network)
    run_step(reducer, world)
    names = sorted({record.name for record in network.records})
    expect("the operations sent", names, ["all_reduce"])
    payload = sum(record.payload_bytes for record in network.records)
    least = sum(parameter.numel() * 4 for parameter in parameters.values())
    most = least + 16 * len(parameters)
    expect(f"between {least} and {most} bytes reduced (counted: {payload})", least <= payload <= most, True)
    count, enough = len(network.records), 2 * len(parameters)
    expect(f"at most {enough} messages for {len(parameters)} parameters (counted: {count})", count <= enough, True)
