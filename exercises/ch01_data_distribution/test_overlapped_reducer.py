"""Tests of overlapped_reducer: gradients that are exact in any order; the order of events, not times."""

import torch
from torch import nn

from exercises.conditions import Choices, check_conditions
from exercises.observations import PeakMemory, expect_order, timeline
from exercises.reducer_run import declare_reducer, grad_of, local_gradient
from exercises.testing import CONDITION_RANKS, expect, expect_raises, test
from minidist.comm import recv, send
from minidist.parallel.data.reducer import register_gradient_hooks
from minidist.parameters import named_parameters, replicated_specs

# In the order of the model; backward finishes them from the last to the first.
SHAPES = {"embed": (8, 4), "first.weight": (4, 4), "first.bias": (4,), "second.weight": (4, 4), "head": (4, 6)}
BUCKET_BYTES = 100
# Of at most 100 bytes each, in the order of backward.
BUCKETS = [["head"], ["second.weight", "first.bias"], ["first.weight"], ["embed"]]


class Net(nn.Module):
    """Parameters whose initial values differ by rank."""

    def __init__(self, rank, shapes, dtype):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name.replace(".", "_"), nn.Parameter(torch.full(shape, 0.5 + rank, dtype=dtype)))


def reducer_of(answer, world, network, shapes=SHAPES, bucket_bytes=BUCKET_BYTES, dtype=torch.float32):
    """Return the learner's reducer on this rank's model, and the parameters by name."""
    model = Net(world.rank, shapes, dtype)
    parameters = named_parameters(model)
    specs = replicated_specs(model, network.group.ranks)
    return answer.OverlappedReducer(parameters, specs, [network.group], bucket_bytes), parameters


def total(name, shape, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(local_gradient(name, shape, rank, step, dtype) for rank in range(world.size))


def backward(reducer, network, rank, shapes=SHAPES, step=0, leave_out=(), mixed=False, dtype=torch.float32):
    """Add this rank's gradients in turn; record an event before each `mark_ready` and one at the end.

    mixed: every rank but the first in an order of its own, not that of the model from its end.
    """
    names = list(reversed(shapes))
    if mixed and rank == 2:  # the second of two parameters in a bucket comes first
        names = [names[0], *names[2:4], names[1], *names[4:]]
    elif mixed and rank:
        names = names[rank % 2 :: 2] + names[1 - rank % 2 :: 2]
    for name in names:
        if name not in leave_out:
            reducer.accumulate(_attribute(name), local_gradient(name, shapes[name], rank, step, dtype))
            network.event(f"ready {name}")
            reducer.mark_ready(_attribute(name))
    network.event("backward is over")


def _attribute(name):
    return name.replace(".", "_")


def sums_are_right(parameters, world, shapes=SHAPES, step=0, dtype=torch.float32):
    for name, shape in shapes.items():
        what = f"the gradient of {name}, summed over ranks" + f", in step {step + 1}" * (step > 0)
        expect(what, grad_of(parameters, _attribute(name)), total(name, shape, world, step, dtype).tolist())


@test(points=3, ranks=(1, 3, 4))
def sums_over_ranks(answer, world, network):
    """After finish_reductions() every rank has the sums, for every bucket size, in the dtype of the parameters."""
    for dtype in (torch.float32, torch.float64):
        for bucket_bytes in (BUCKET_BYTES, 1, 10**6):
            reducer, parameters = reducer_of(answer, world, network, bucket_bytes=bucket_bytes, dtype=dtype)
            backward(reducer, network, world.rank, dtype=dtype)
            reducer.finish_reductions()
            sums_are_right(parameters, world, dtype=dtype)
    if world.size == 4:
        two_groups(answer, world, network)


def two_groups(answer, world, network):
    """Every other parameter has replicas on every other rank only."""
    model, half = Net(world.rank, SHAPES, torch.float32), network.divided_group
    specs, divided = (replicated_specs(model, group.ranks) for group in (network.group, half))
    small = [_attribute(name) for name in list(SHAPES)[::2]]
    parameters = named_parameters(model)
    specs |= {name: divided[name] for name in small}
    reducer = answer.OverlappedReducer(parameters, specs, [network.group, half], 10**6)
    backward(reducer, network, world.rank)
    reducer.finish_reductions()
    for name, shape in SHAPES.items():
        ranks = half.ranks if _attribute(name) in small else network.group.ranks
        wanted = sum(local_gradient(name, shape, rank) for rank in ranks).tolist()
        got = grad_of(parameters, _attribute(name))
        expect(f"the gradient of {name}, summed over ranks {list(ranks)}", got, wanted)


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
    launched = len(network.records)
    reducer.finish_reductions()
    sizes = [sum(4 * torch.Size(SHAPES[name]).numel() for name in bucket) for bucket in BUCKETS]
    sent = [record.payload_bytes for record in network.records]
    near = len(sent) == len(sizes) and all(0 <= a - b <= 4 * len(SHAPES) for a, b in zip(sent, sizes, strict=True))
    what = (
        f"one message per bucket, in index order, of {sizes} bytes and at most {4 * len(SHAPES)} more (counted: {sent})"
    )
    expect(what, near, True)
    expect("buckets that were launched when backward was over", launched, len(BUCKETS))
    happened = timeline(network)
    for number, bucket in enumerate(BUCKETS):
        early = [name for name in bucket if happened.index(f"ready {name}") > happened.index(f"launch {number}")]
        expect(f"gradients of bucket {number} that come after its launch", early, [])
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
    reducer.clear_gradients()
    reducer.finish_reductions()
    happened = timeline(network)
    order = [event.split()[0] for event in happened[happened.index("finish_reductions() has returned") + 1 :]]
    expect("events of a step without gradients", order, ["launch"] * len(BUCKETS) + ["wait"] * len(BUCKETS))


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
            if step:  # of an earlier micro-batch: it is not ready in the last one
                leave_out = ("never", "rare")
                if world.rank == user:
                    reducer.accumulate("rare", local_gradient("rare", (2,), user, step))
            backward(reducer, network, world.rank, shapes, step, leave_out, mixed=True)
            reducer.finish_reductions()
            what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
            expect(what, grad_of(parameters, "rare"), local_gradient("rare", (2,), user, step).tolist())
            expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
            sums_are_right(parameters, world, step=step)
            reducer.clear_gradients()


@test(points=3, ranks=(2,))
def steps_are_independent(answer, world, network):
    """A step contains nothing of the one before, even if that one was aborted before its first bucket was complete."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(3):
        if step != 1:
            backward(reducer, network, world.rank, step=step)
            expect_raises(RuntimeError, reducer.accumulate, "head", local_gradient("head", SHAPES["head"], 0))
            reducer.finish_reductions()
            sums_are_right(parameters, world, step=step)
        else:
            names = [name for name in SHAPES if name != "head"]
            backward(
                reducer, network, world.rank, step=step, shapes={name: SHAPES[name] for name in names[world.rank :]}
            )
        reducer.clear_gradients()
        left = [name for name in parameters if parameters[name].grad is not None]
        expect("parameters with a .grad after clear_gradients()", left, [])


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


def model_of(seed):
    """Three layers in float64; the buckets of at most 300 bytes are [4.bias, 4.weight], [2.bias], [2.weight], ..."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
        return nn.Sequential(*layers).double()


def samples(rank):
    """This rank's two micro-batches, of 3 + rank and 2 samples."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in (3 + rank, 2)]


@test(points=4, ranks=(1, 2, 3, 4))
def backward_of_a_model(answer, world, network):
    """With hooks on a model: buckets are launched in the last micro-batch, while backward still computes gradients."""
    count = sum(len(x) for rank in range(world.size) for x in samples(rank))
    model, last = model_of(0), False
    parameters = named_parameters(model)
    reducer = answer.OverlappedReducer(parameters, replicated_specs(model, network.group.ranks), [network.group], 300)
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: network.event(f"gradient of {name}"))
    register_gradient_hooks(parameters, reducer, lambda: last)
    for _ in range(2):  # steps
        for last, x in zip((False, True), samples(world.rank), strict=True):
            network.event(f"micro-batch {int(last)}")
            (model(x).square().sum() / count).backward()
        network.event("backward is over")
        reducer.finish_reductions()
        alone = model_of(0)
        every = torch.cat([x for rank in range(world.size) for x in samples(rank)])
        (alone(every).square().sum() / count).backward()
        for name, parameter in named_parameters(alone).items():
            what, got = f"the gradient of {name}, compared with one process", parameters[name].grad
            expect(what, None if got is None else got, parameter.grad, tolerance=1e-14)
        reducer.clear_gradients()
    if world.size > 1:
        happened = timeline(network)
        first, over = happened.index("micro-batch 1"), happened.index("backward is over")
        expect("messages in the first micro-batch", [each for each in happened[:first] if "launch" in each], [])
        inside = [each for each in happened[first:over] if "launch" in each or "0.weight" in each or "wait" in each]
        wanted = [*(f"launch {number}" for number in range(4)), "gradient of 0.weight"]
        expect("launches and waits until the gradient of 0.weight, the last one", inside[: len(wanted)], wanted)


def make_reducer(answer, parameters, specs, groups, bucket_bytes):
    return answer.OverlappedReducer(parameters, specs, groups, bucket_bytes)


DECLARATION = declare_reducer(make_reducer, bucket_bytes=Choices((20, 1, 1 << 20)))


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size and bucket size, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
