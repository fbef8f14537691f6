"""Tests of gradient_sum: the gradients are multiples of one small number, so that sums are exact in any order."""

import torch
from torch import nn

from exercises.testing import expect, test
from minidist.parameters import named_parameters, replicated_specs

SHAPES = {"weight": (20, 3), "bias": (3,), "scale": ()}


class Net(nn.Module):
    """Parameters that start different on every rank; `rare` is used by the last rank only, `never` by none."""

    def __init__(self, rank, dtype):
        super().__init__()
        for name, shape in {**SHAPES, "rare": (2,), "never": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))


def gradient(name, rank, step=0, dtype=torch.float32):
    """What one rank adds, other numbers for every rank, parameter, element and step.

    They are whole in float32; in float64 they have a part that float32 has no room for.
    """
    shape = SHAPES[name]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    return numbers + 10 * rank + 100 * step + len(name) + (2.0**-40 if dtype == torch.float64 else 0)


def reducer_of(answer, world, network, dtype=torch.float32):
    """The learner's reducer over a model of this rank, and the parameters by name."""
    model = Net(world.rank, dtype)
    parameters = named_parameters(model)
    return answer.NaiveReducer(parameters, replicated_specs(model, network.group.ranks), [network.group]), parameters


def run_step(reducer, world, step=0, dtype=torch.float32):
    """Hand over this rank's gradients and finish."""
    for name in SHAPES:
        reducer.add(name, gradient(name, world.rank, step, dtype))
        reducer.ready(name)
    reducer.finish()


def total(name, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(gradient(name, rank, step, dtype) for rank in range(world.size))


def grad_of(parameters, name):
    """The gradient as lists; None when there is none."""
    return None if parameters[name].grad is None else parameters[name].grad.tolist()


@test(points=4, ranks=(1, 4))
def sums_over_ranks(answer, world, network):
    """After finish() every rank has the sum of all ranks' gradients, as exact as the parameters are."""
    for dtype in (torch.float32, torch.float64):
        reducer, parameters = reducer_of(answer, world, network, dtype)
        run_step(reducer, world, dtype=dtype)
        for name in SHAPES:
            expected = total(name, world, dtype=dtype).tolist()
            expect(f"the {str(dtype)[6:]} gradient of {name}", grad_of(parameters, name), expected)


@test(points=2, ranks=(2,))
def each_step_by_itself(answer, world, network):
    """The second step's gradient holds nothing of the first."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(2):
        run_step(reducer, world, step)
    for name in SHAPES:
        expected = total(name, world, 1).tolist()
        expect(f"the gradient of {name} in step 2", grad_of(parameters, name), expected)


@test(points=3, ranks=(2,))
def unused_is_agreed(answer, world, network):
    """A parameter that one rank used gets its gradient everywhere; one that nobody used keeps None."""
    reducer, parameters = reducer_of(answer, world, network)
    if world.rank == world.size - 1:
        reducer.add("rare", torch.tensor([3.0, 4.0]))
    run_step(reducer, world)
    expect("the gradient of a parameter that only the last rank used", grad_of(parameters, "rare"), [3.0, 4.0])
    expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)


@test(points=2, ranks=(2,))
def parameters_stay(answer, world, network):
    """The reducer changes gradients, never parameters."""
    reducer, parameters = reducer_of(answer, world, network)
    run_step(reducer, world)
    for name, shape in SHAPES.items():
        expect(f"the gradient of {name}", grad_of(parameters, name), total(name, world).tolist())
        expect(f"the parameter {name}", parameters[name], torch.full(shape, 0.5 + world.rank))


@test(points=3, ranks=(2,))
def nothing_more_is_sent(answer, world, network):
    """Each gradient is all-reduced once, and besides at most one message of at most 16 bytes per parameter."""
    reducer, parameters = reducer_of(answer, world, network)
    run_step(reducer, world)
    names = sorted({record.name for record in network.records})
    expect("the operations beneath torch", names, ["all_reduce"])
    payload = sum(record.payload_bytes for record in network.records)
    least = sum(parameter.numel() * 4 for parameter in parameters.values())
    most = least + 16 * len(parameters)
    expect(f"between {least} and {most} bytes reduced, not {payload}", least <= payload <= most, True)
    count, enough = len(network.records), 2 * len(parameters)
    expect(f"at most {enough} messages for {len(parameters)} parameters, not {count}", count <= enough, True)
