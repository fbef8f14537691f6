"""Tests of bucketed_reducer: gradients are integers, added in an order that differs by rank."""

import torch
from torch import nn

from exercises.observations import PeakMemory, expect_order, timeline
from exercises.testing import expect, test
from minidist.comm import recv, send
from minidist.parameters import named_parameters, replicated_specs

# In the order of the model; backward finishes them from the last to the first.
SHAPES = {"embed": (8, 4), "first.weight": (4, 4), "first.bias": (4,), "second.weight": (4, 4), "head": (4, 6)}
BUCKET_BYTES = 100
# Of at most 100 bytes each, in the order of backward.
BUCKETS = [["head"], ["second.weight", "first.bias"], ["first.weight"], ["embed"]]


class Net(nn.Module):
    """Parameters whose initial values differ by rank."""

    def __init__(self, rank, shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name.replace(".", "_"), nn.Parameter(torch.full(shape, 0.5 + rank)))


def reducer_of(answer, world, network, shapes=SHAPES, bucket_bytes=BUCKET_BYTES):
    """Return the learner's reducer on this rank's model, and the parameters by name."""
    model = Net(world.rank, shapes)
    parameters = named_parameters(model)
    specs = replicated_specs(model, network.group.ranks)
    return answer.BucketedReducer(parameters, specs, [network.group], bucket_bytes), parameters


def gradient(name, shape, rank, step=0):
    """Return the local gradient of one rank: integers that differ by rank, parameter, element and step."""
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return numbers + 10 * rank + 100 * step + len(name)


def total(name, shape, world, step=0):
    """The sum over all ranks."""
    return sum(gradient(name, shape, rank, step) for rank in range(world.size))


def backward(reducer, network, rank, shapes=SHAPES, step=0, leave_out=(), mixed=False):
    """Add this rank's gradients in turn; record an event before each `mark_ready` and one at the end.

    mixed: every rank but the first in an order of its own, not that of the model from its end.
    """
    names = list(reversed(shapes))
    if mixed and rank:
        names = names[rank % 2 :: 2] + names[1 - rank % 2 :: 2]
    for name in names:
        if name not in leave_out:
            reducer.accumulate(_attribute(name), gradient(name, shapes[name], rank, step))
            network.event(f"ready {name}")
            reducer.mark_ready(_attribute(name))
    network.event("backward is over")


def _attribute(name):
    return name.replace(".", "_")


def grad_of(parameters, name):
    """Return the gradient as nested lists, or None."""
    grad = parameters[_attribute(name)].grad
    return None if grad is None else grad.tolist()


def sums_are_right(parameters, world, shapes=SHAPES, step=0):
    for name, shape in shapes.items():
        what = f"the gradient of {name}, summed over ranks" + f", in step {step + 1}" * (step > 0)
        expect(what, grad_of(parameters, name), total(name, shape, world, step).tolist())


@test(points=3, ranks=(4,))
def sums_over_ranks(answer, world, network):
    """After finish_reductions() every rank has the sums, for every bucket size."""
    for bucket_bytes in (BUCKET_BYTES, 1, 10**6):
        reducer, parameters = reducer_of(answer, world, network, bucket_bytes=bucket_bytes)
        backward(reducer, network, world.rank)
        reducer.finish_reductions()
        sums_are_right(parameters, world)


@test(points=3, ranks=(2,))
def launched_inside_backward(answer, world, network):
    """Each bucket is launched as early as possible, the first one in the first half of backward."""
    reducer, _ = reducer_of(answer, world, network)
    backward(reducer, network, world.rank)
    reducer.finish_reductions()
    expected = []
    for number, bucket in enumerate(BUCKETS):
        expected += [f"ready {name}" for name in bucket] + [f"launch {number}"]
    happened = [event for event in timeline(network) if not event.startswith("wait")]
    expect_order(happened, [*expected, "backward is over"])


@test(points=3, ranks=(4,))
def launched_in_index_order(answer, world, network):
    """Gradients become ready in a different order on every rank, but all ranks launch the buckets in one order."""
    reducer, parameters = reducer_of(answer, world, network)
    backward(reducer, network, world.rank, mixed=True)
    reducer.finish_reductions()
    sizes = [sum(4 * torch.Size(SHAPES[name]).numel() for name in bucket) for bucket in BUCKETS]
    sent = [record.payload_bytes for record in network.records]
    near = len(sent) == len(sizes) and all(0 <= a - b <= 4 * len(SHAPES) for a, b in zip(sent, sizes, strict=True))
    what = (
        f"one message per bucket, in index order, of {sizes} bytes and at most {4 * len(SHAPES)} more (counted: {sent})"
    )
    expect(what, near, True)
    sums_are_right(parameters, world)


@test(points=3, ranks=(2,))
def waits_at_the_end(answer, world, network):
    """The reducer waits for no bucket during backward, and for every bucket in finish_reductions()."""
    reducer, _ = reducer_of(answer, world, network)
    backward(reducer, network, world.rank)
    reducer.finish_reductions()
    network.event("finish_reductions() has returned")
    happened = timeline(network)
    inside = happened[: happened.index("backward is over")]
    expect("waits inside backward", [event for event in inside if event.startswith("wait")], [])
    ended = happened[happened.index("backward is over") : happened.index("finish_reductions() has returned")]
    expect(
        "waits in finish_reductions()",
        sorted(event for event in ended if event.startswith("wait")),
        _waits(len(BUCKETS)),
    )


def _waits(count):
    return [f"wait {number}" for number in range(count)]


@test(points=3, ranks=(2,))
def unused_parameters(answer, world, network):
    """A parameter that one rank used gets its gradient on all ranks; one that no rank used keeps None."""
    shapes = {"never": (3,), "rare": (2,), **SHAPES}
    for bucket_bytes in (1, 10**6):
        reducer, parameters = reducer_of(answer, world, network, shapes, bucket_bytes)
        for step in range(2):
            user = (world.size - 1 + step) % world.size  # another rank in each step
            leave_out = ("never",) if world.rank == user else ("never", "rare")
            backward(reducer, network, world.rank, shapes, step, leave_out, mixed=True)
            reducer.finish_reductions()
            what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
            expect(what, grad_of(parameters, "rare"), gradient("rare", (2,), user, step).tolist())
            expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
            sums_are_right(parameters, world, step=step)
            reducer.clear_gradients()


@test(points=3, ranks=(2,))
def buffers_in_flight_are_not_reused(answer, world, network):
    """A buffer in flight is not reused: rank 1 is late, and rank 0 fills other buckets meanwhile."""
    reducer, parameters = reducer_of(answer, world, network)
    turn = torch.zeros(1)
    if world.rank == 1:
        recv(turn, 0, network.group)
    backward(reducer, network, world.rank)
    if world.rank == 0:
        send(turn, 1, network.group)
    reducer.finish_reductions()
    sums_are_right(parameters, world)


@test(points=2, ranks=(2,))
def no_second_copy_of_gradients(answer, world, network):
    """Gradients are stored in the buckets only: no second copy is made for sending."""
    shapes = {f"layer{number}": (25, 100) for number in range(8)}  # 10 kB each
    whole = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    with PeakMemory() as memory:
        reducer, parameters = reducer_of(answer, world, network, shapes, 10_000)
        backward(reducer, network, world.rank, shapes)
        reducer.finish_reductions()
    sums_are_right(parameters, world, shapes)
    # Whatever the answer does, there are the parameters, and a few of one gradient's size while it is being made.
    got, most = memory.peak_bytes - whole, whole + 50_000
    case = f"{whole // 1000} kB of parameters"
    expect(
        f"at most {most // 1000} kB peak memory for gradients (measured: {got // 1000} kB)",
        got <= most,
        True,
        case=case,
    )
