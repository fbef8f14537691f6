"""Tests of flat_reducer: gradients that are exact in any order of addition, different on every rank."""

import torch
from torch import nn

from exercises.conditions import check_conditions
from exercises.reducer_run import declare_reducer, grad_of, local_gradient
from exercises.testing import CONDITION_RANKS, expect, expect_raises, test
from minidist.parameters import named_parameters, replicated_specs

SHAPES = {"embed": (8, 5), "weight": (5, 3), "bias": (3,), "scale": ()}


class Net(nn.Module):
    """Parameters whose initial values differ by rank; ranks take turns to use `rare`, and none uses `never`."""

    def __init__(self, rank, dtype):
        super().__init__()
        for name, shape in {"never": (2,), **SHAPES, "rare": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))


def gradient(name, rank, step=0, dtype=torch.float32):
    return local_gradient(name, SHAPES[name], rank, step, dtype)


def reducer_of(answer, world, network, dtype=torch.float32):
    """Return the learner's reducer on this rank's model, and the parameters by name."""
    model = Net(world.rank, dtype)
    parameters = named_parameters(model)
    return answer.FlatReducer(parameters, replicated_specs(model, network.group.ranks), [network.group]), parameters


def backward(reducer, rank, step=0, dtype=torch.float32):
    """Add this rank's gradients, in an order that differs by rank."""
    names = list(reversed(SHAPES))
    for name in names[rank:] + names[:rank]:
        reducer.accumulate(name, gradient(name, rank, step, dtype))
        reducer.mark_ready(name)


def expect_sums(parameters, world, step=0, dtype=torch.float32):
    for name in SHAPES:
        expected = sum(gradient(name, rank, step, dtype) for rank in range(world.size))
        what = f"the {str(dtype)[6:]} gradient of {name} in step {step + 1}"
        expect(what, grad_of(parameters, name), expected.tolist())


@test(points=3, ranks=(1, 3, 4))
def sums_over_ranks(answer, world, network):
    """Every rank has the sum of all ranks' gradients, whatever the order in which each rank computed them."""
    for dtype in (torch.float32, torch.float64):
        reducer, parameters = reducer_of(answer, world, network, dtype)
        backward(reducer, world.rank, dtype=dtype)
        reducer.finish_reductions()
        expect_sums(parameters, world, dtype=dtype)
        for name, parameter in parameters.items():
            expect(f"the parameter {name}", parameter, torch.full_like(parameter, 0.5 + world.rank))


@test(points=4, ranks=(2,))
def one_message_after_backward(answer, world, network):
    """All gradients are sent in one all-reduce, in finish_reductions(); beside them 16 bytes per parameter at most."""
    reducer, parameters = reducer_of(answer, world, network)
    backward(reducer, world.rank)
    for name in ("rare", "never"):
        reducer.mark_ready(name)
    expect("messages before finish_reductions()", len(network.records), 0)
    reducer.finish_reductions()
    expect_sums(parameters, world)
    sent = [record.payload_bytes for record in network.records]
    flags = 16 * len(parameters)
    expect("the operations sent", sorted({record.name for record in network.records}), ["all_reduce"])
    expect(f"messages of more than {flags} bytes (counted: {sent})", sum(size > flags for size in sent), 1)
    expect(f"messages of at most {flags} bytes: one or none (counted: {sent})", len(sent) <= 2, True)
    least = 4 * sum(parameters[name].numel() for name in SHAPES)
    most = 4 * sum(parameter.numel() for parameter in parameters.values()) + flags
    expect(f"between {least} and {most} bytes in all (counted: {sum(sent)})", least <= sum(sent) <= most, True)


@test(points=3, ranks=(2,))
def unused_parameters(answer, world, network):
    """A parameter that one rank used gets its gradient on all ranks, also zeros; one that no rank used keeps None."""
    reducer, parameters = reducer_of(answer, world, network)
    for step, values in enumerate(([3.0, 4.0], [0.0, 0.0], [5.0, 6.0])):
        user = (world.size - 1 + step) % world.size  # another rank in each step
        if world.rank == user:
            reducer.accumulate("rare", torch.tensor(values))
        backward(reducer, world.rank, step)
        reducer.finish_reductions()
        what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
        expect(what, grad_of(parameters, "rare"), values)
        expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
        expect_sums(parameters, world, step)
        reducer.clear_gradients()
    if world.rank == 0:
        backward(reducer, 0)
    reducer.finish_reductions()
    wanted = gradient("embed", 0).tolist()
    expect("the gradient of embed if rank 1 used no parameter", grad_of(parameters, "embed"), wanted)
    reducer.clear_gradients()
    reducer.finish_reductions()
    used = [name for name, parameter in parameters.items() if parameter.grad is not None]
    expect("parameters with a gradient after a step that used none", used, [])


@test(points=2, ranks=(2,))
def steps_are_independent(answer, world, network):
    """Micro-batches add up; a step contains nothing of the one before, even if that one was aborted."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(3):
        if step != 1:
            for name in SHAPES:  # an extra micro-batch, on rank 1 only
                reducer.accumulate(name, world.rank * gradient(name, 0, step))
            backward(reducer, world.rank, step)
            reducer.finish_reductions()
            for name in SHAPES:
                expected = sum(gradient(name, rank, step) for rank in (*range(world.size), 0))
                expect(f"the gradient of {name} in step {step + 1}", grad_of(parameters, name), expected.tolist())
        else:  # aborted
            backward(reducer, world.rank)
            expect_raises(RuntimeError, reducer.accumulate, "bias", gradient("bias", 0))
        reducer.clear_gradients()
        left = [name for name in parameters if parameters[name].grad is not None]
        expect("parameters with a .grad after clear_gradients()", left, [])


@test(points=2, ranks=(4,))
def one_buffer_per_process_group(answer, world, network):
    """Gradients that other ranks sum are in another buffer: `embed` and `bias` are summed over every second rank."""
    model, small = Net(world.rank, torch.float32), network.divided_group
    specs = replicated_specs(model, network.group.ranks)
    divided = replicated_specs(model, small.ranks)
    specs |= {name: divided[name] for name in ("embed", "bias")}
    parameters = named_parameters(model)
    reducer = answer.FlatReducer(parameters, specs, [network.group, small])
    backward(reducer, world.rank)
    reducer.finish_reductions()
    for name in SHAPES:
        ranks = small.ranks if name in ("embed", "bias") else range(world.size)
        expected = sum(gradient(name, rank) for rank in ranks).tolist()
        expect(f"the gradient of {name}, summed over ranks {list(ranks)}", grad_of(parameters, name), expected)
    sent = [record.payload_bytes for record in network.records if record.payload_bytes > 72]
    expect("messages of more than 72 bytes", len(sent), 2)
    groups_of_equal_size(answer, world, network)


def groups_of_equal_size(answer, world, network):
    """Two groups of two ranks: `embed` and `bias` have replicas on every other rank, the rest on consecutive ranks."""
    model, other, pair = Net(world.rank, torch.float32), network.divided_group, network.pair_group
    specs, parameters = replicated_specs(model, pair.ranks), named_parameters(model)
    specs |= {name: replicated_specs(model, other.ranks)[name] for name in ("embed", "bias")}
    reducer = answer.FlatReducer(parameters, specs, [other, pair])
    backward(reducer, world.rank)
    reducer.finish_reductions()
    for name in SHAPES:
        ranks = other.ranks if name in ("embed", "bias") else pair.ranks
        expected = sum(gradient(name, rank) for rank in ranks).tolist()
        expect(f"the gradient of {name}, summed over ranks {list(ranks)}", grad_of(parameters, name), expected)


def make_reducer(answer, parameters, specs, groups):
    return answer.FlatReducer(parameters, specs, groups)


DECLARATION = declare_reducer(make_reducer)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype and size, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
