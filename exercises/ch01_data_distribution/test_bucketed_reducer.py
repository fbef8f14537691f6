"""Tests of bucketed_reducer: gradients that are exact in any order; the order of events, not times."""

import torch
from torch import nn

from exercises.conditions import Choices, Declaration, Growth, check_conditions
from exercises.observations import expect_order, timeline
from exercises.reducer_run import declare_reducer, grad_of, local_gradient
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import recv, send
from minidist.parameters import named_parameters
from minidist.simple.data_parallel import register_gradient_hooks

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


def reducer_of(answer, world, network, shapes=SHAPES, bucket_bytes=BUCKET_BYTES, dtype=torch.float32, per_step=1):
    """Return the learner's reducer of this rank's parameters, and the parameters by name. per_step: micro-batches."""
    parameters = named_parameters(Net(world.rank, shapes, dtype))
    reducer = answer.BucketedReducer(parameters, parameters, network.group, per_step, bucket_bytes=bucket_bytes)
    return reducer, parameters


def total(name, shape, world, step=0, dtype=torch.float32):
    """The sum over all ranks."""
    return sum(local_gradient(name, shape, rank, step, dtype) for rank in range(world.size))


def backward(reducer, network, rank, shapes=SHAPES, step=0, leave_out=(), mixed=False, dtype=torch.float32):
    """Add this rank's gradients in turn; record an event before each, and one at the end.

    mixed: every rank but the first in an order of its own, not that of the model from its end.
    """
    names = list(reversed(shapes))
    if mixed and rank == 2:  # the second of two parameters in a bucket comes first
        names = [names[0], *names[2:4], names[1], *names[4:]]
    elif mixed and rank:
        names = names[rank % 2 :: 2] + names[1 - rank % 2 :: 2]
    for name in names:
        if name not in leave_out:
            network.event(f"add {name}")
            reducer.add(_attribute(name), local_gradient(name, shapes[name], rank, step, dtype))
    network.event("backward is over")


def _attribute(name):
    return name.replace(".", "_")


def sums_are_right(parameters, world, shapes=SHAPES, step=0, dtype=torch.float32):
    for name, shape in shapes.items():
        what = f"the gradient of {name}, summed over ranks" + f", in step {step + 1}" * (step > 0)
        expect(what, grad_of(parameters, _attribute(name)), total(name, shape, world, step, dtype).tolist())


@test(points=3, ranks=(1, 3, 4))
def sums_over_ranks(answer, world, network):
    """After finish() every rank has the sums, for every bucket size, in the dtype of the masters."""
    for dtype in (torch.float32, torch.float64):
        for bucket_bytes in (BUCKET_BYTES, 1, 10**6):
            reducer, parameters = reducer_of(answer, world, network, bucket_bytes=bucket_bytes, dtype=dtype)
            backward(reducer, network, world.rank, dtype=dtype)
            reducer.finish()
            sums_are_right(parameters, world, dtype=dtype)
    masters_wider_than_parameters(answer, world, network)


def masters_wider_than_parameters(answer, world, network):
    """Buckets of the masters' dtype and bytes: bfloat16 gradients of which the sum needs more digits."""
    parameters = named_parameters(Net(world.rank, SHAPES, torch.bfloat16))
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
    reducer = answer.BucketedReducer(parameters, masters, network.group, 2, bucket_bytes=BUCKET_BYTES)
    before = len(network.records)
    for part in (1.0, 2.0**-10):
        for name in reversed(SHAPES):
            reducer.add(_attribute(name), torch.full(SHAPES[name], part * (1 + world.rank), dtype=torch.bfloat16))
    launched = len(network.records) - before
    reducer.finish()
    factor = sum(1 + rank for rank in range(world.size))
    for name, shape in SHAPES.items():
        got, wanted = grad_of(masters, _attribute(name)), torch.full(shape, factor * (1 + 2.0**-10)).tolist()
        expect(f"the gradient of the float32 master of {name}, a bfloat16 parameter", got, wanted)
    if world.size > 1:
        expect("buckets launched inside backward, of float32 masters", launched, len(BUCKETS))


@test(points=3, ranks=(2,))
def launched_inside_backward(answer, world, network):
    """Each bucket is launched as early as possible, the first one in the first half of backward."""
    reducer, _ = reducer_of(answer, world, network)
    backward(reducer, network, world.rank)
    reducer.finish()
    expect_earliest_launches(network, reversed(SHAPES))
    left_out = ((), ("embed",), ("first.bias",))
    for mine in range(len(left_out)):  # the steps of one reducer
        reducer.clear()
        network.begin()
        leave_out = left_out[(mine + world.rank) % len(left_out)]  # another rank leaves out others
        backward(reducer, network, world.rank, leave_out=leave_out)
        reducer.finish()
        expect_earliest_launches(network, [name for name in reversed(SHAPES) if name not in leave_out])
    one_bucket_is_enough(answer, world, network)


def expect_earliest_launches(network, added):
    """Check the events of a backward: each bucket is launched after the first add() that allows it."""
    expected, missing, launched = [], [set(bucket) for bucket in BUCKETS], 0
    for name in added:
        expected.append(f"add {name}")
        for bucket in missing:
            bucket.discard(name)
        while launched < len(BUCKETS) and not missing[launched]:
            expected.append(f"launch {launched}")
            launched += 1
    happened = [event for event in timeline(network) if not event.startswith("wait")]
    expect_order(happened[: len(expected) + 1], [*expected, "backward is over"])


def one_bucket_is_enough(answer, world, network):
    """Gradients that fit together in the default bucket_bytes share one bucket."""
    parameters = named_parameters(Net(world.rank, {f"layer{number}": (100_000,) for number in range(4)}, torch.float32))
    reducer = answer.BucketedReducer(parameters, parameters, network.group)
    network.begin()
    for name in reversed(parameters):
        reducer.add(name, torch.ones(100_000))
    sent = [record.payload_bytes for record in network.records]
    reducer.finish()
    expect("bytes of the messages, given the default bucket_bytes", sent, [1_600_000])


@test(points=3, ranks=(4,))
def launched_in_index_order(answer, world, network):
    """Gradients become ready in a different order on every rank, but all ranks launch the buckets in one order."""
    reducer, parameters = reducer_of(answer, world, network)
    backward(reducer, network, world.rank, mixed=True)
    launched = len(network.records)
    reducer.finish()
    sizes = [sum(4 * torch.Size(SHAPES[name]).numel() for name in bucket) for bucket in BUCKETS]
    sent = [record.payload_bytes for record in network.records]
    expect("bytes of the messages, one per bucket, in index order", sent[: len(sizes)], sizes)
    rest = sum(sent[len(sizes) :])
    expect(f"at most {16 * len(SHAPES)} bytes after the buckets (counted: {rest})", rest <= 16 * len(SHAPES), True)
    expect("buckets that were launched when backward was over", launched, len(BUCKETS))
    happened = timeline(network)
    expect_complete_buckets(happened)
    added = [event for event in happened if event.startswith("add ")]
    expect_earliest_launches(network, [event.removeprefix("add ") for event in added])
    sums_are_right(parameters, world)
    fills_each_bucket(answer, world, network)


def fills_each_bucket(answer, world, network):
    """Each bucket takes the next gradient if it fits, up to the limit itself."""
    sizes = [4 * torch.Size(shape).numel() for shape in reversed(SHAPES.values())]  # 96, 64, 16, 64 and 128 bytes
    for bucket_bytes in (16, 80, 95, 96, 143, 144, 159, 160, 368):
        expected = []
        for size in sizes:
            if expected and sum(expected[-1]) + size <= bucket_bytes:
                expected[-1].append(size)
            else:
                expected.append([size])
        reducer, _ = reducer_of(answer, world, network, bucket_bytes=bucket_bytes)
        network.begin()
        backward(reducer, network, world.rank)
        sent = [record.payload_bytes for record in network.records]
        reducer.finish()
        case = f"gradients of {sizes} bytes in the order of backward, bucket_bytes={bucket_bytes}"
        expect("bytes of the messages, one per bucket", sent, [sum(bucket) for bucket in expected], case=case)


def expect_complete_buckets(happened, case=""):
    """Check the events of a step: each bucket is launched after the last of its gradients has been added."""
    for number, bucket in enumerate(BUCKETS):
        launch = f"launch {number}"
        added_later = happened[happened.index(launch) :] if launch in happened else []
        late = [name for name in bucket if f"add {name}" in added_later]
        expect(f"gradients of bucket {number} that come after its launch", late, [], case=case)


@test(points=3, ranks=(2,))
def waits_at_the_end(answer, world, network):
    """The reducer waits for no bucket during backward, and for every bucket in finish()."""
    reducer, _ = reducer_of(answer, world, network)
    backward(reducer, network, world.rank)
    reducer.finish()
    network.event("finish() has returned")
    happened = timeline(network)
    inside = happened[: happened.index("backward is over")]
    expect("waits inside backward", [event for event in inside if event.startswith("wait")], [])
    ended = happened[happened.index("backward is over") : happened.index("finish() has returned")]
    waits = sorted(event for event in ended if event in _waits(len(BUCKETS)))
    expect("waits for the buckets in finish()", waits, _waits(len(BUCKETS)))
    reducer.clear()
    reducer.finish()
    happened = timeline(network)
    order = [event.split()[0] for event in happened[happened.index("finish() has returned") + 1 :]]
    wanted = ["launch"] * len(BUCKETS) + ["wait"] * len(BUCKETS)
    expect("the first events of a step without gradients", order[: len(wanted)], wanted)


def _waits(count):
    return [f"wait {number}" for number in range(count)]


@test(points=3, ranks=(2,))
def launched_in_the_last_micro_batch(answer, world, network):
    """With several micro-batches nothing is sent before the last; a rank with fewer launches in finish()."""
    reducer, parameters = reducer_of(answer, world, network, per_step=3)
    for step in range(2):
        count = 3 if world.rank == step else 2  # of this rank, in this step
        before = len(network.records)
        for part in range(count):
            expect(f"messages before micro-batch {part + 1}", len(network.records) - before, 0)
            backward(reducer, network, world.rank, step=part)
        launched = len(network.records) - before
        expect(f"buckets launched in backward, after {count} of 3 micro-batches", launched, len(BUCKETS) * (count == 3))
        reducer.finish()
        for name, shape in SHAPES.items():
            counts = [3 if rank == step else 2 for rank in range(world.size)]
            parts = [
                local_gradient(name, shape, rank, part) for rank in range(world.size) for part in range(counts[rank])
            ]
            what = f"the gradient of {name}, with {counts} micro-batches on the ranks"
            expect(what, grad_of(parameters, _attribute(name)), sum(parts).tolist())
        reducer.clear()


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
            reducer.finish()
            what = f"the gradient of a parameter that only rank {user} used, in step {step + 1}"
            expect(what, grad_of(parameters, "rare"), local_gradient("rare", (2,), user, step).tolist())
            expect("the gradient of a parameter that no rank used", grad_of(parameters, "never"), None)
            sums_are_right(parameters, world, step=step)
            reducer.clear()


@test(points=3, ranks=(2,))
def steps_are_independent(answer, world, network):
    """A step contains nothing of the one before, even if that one was aborted before its first bucket was complete."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(3):
        if step != 1:
            network.begin()
            backward(reducer, network, world.rank, step=step)
            reducer.finish()
            expect_complete_buckets(timeline(network), f"step {step + 1}; step 2 is aborted")
            sums_are_right(parameters, world, step=step)
        else:
            names = [name for name in SHAPES if name != "head"]
            backward(
                reducer, network, world.rank, step=step, shapes={name: SHAPES[name] for name in names[world.rank :]}
            )
        reducer.clear()
        left = [name for name in parameters if parameters[name].grad is not None]
        expect("parameters with a .grad after clear()", left, [])


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
    reducer.finish()
    sums_are_right(parameters, world)


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
    model = model_of(0)
    parameters = named_parameters(model)
    reducer = answer.BucketedReducer(parameters, parameters, network.group, 2, bucket_bytes=300)
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: network.event(f"gradient of {name}"))
    register_gradient_hooks(parameters, reducer.add)
    for _ in range(2):  # steps
        for number, x in enumerate(samples(world.rank)):
            network.event(f"micro-batch {number}")
            (model(x).square().sum() / count).backward()
        network.event("backward is over")
        reducer.finish()
        alone = model_of(0)
        every = torch.cat([x for rank in range(world.size) for x in samples(rank)])
        (alone(every).square().sum() / count).backward()
        for name, parameter in named_parameters(alone).items():
            what, got = f"the gradient of {name}, compared with one process", parameters[name].grad
            expect(what, None if got is None else got, parameter.grad, tolerance=1e-14)
        reducer.clear()
    if world.size > 1:
        happened = timeline(network)
        first, over = happened.index("micro-batch 1"), happened.index("backward is over")
        expect("messages in the first micro-batch", [each for each in happened[:first] if "launch" in each], [])
        inside = [each for each in happened[first:over] if "launch" in each or "0.weight" in each or "wait" in each]
        wanted = [*(f"launch {number}" for number in range(4)), "gradient of 0.weight"]
        expect("launches and waits until the gradient of 0.weight, the last one", inside[: len(wanted)], wanted)


def make_reducer(answer, parameters, group, bucket_bytes):
    return answer.BucketedReducer(parameters, parameters, group, bucket_bytes=bucket_bytes)


DECLARATION = declare_reducer(make_reducer, bucket_bytes=Choices((20, 1, 1 << 20)))


LAYER = (25, 100)  # 10 kB, as much as a bucket


def step_of_layers(answer, group, layers):
    """Return the gradients of a step of a model of so many equal layers."""
    shapes = {f"layer{number}": LAYER for number in range(layers)}
    parameters = named_parameters(Net(group.rank, shapes, torch.float32))
    reducer = answer.BucketedReducer(parameters, parameters, group, bucket_bytes=10_000)
    for name in reversed(shapes):
        reducer.add(name, local_gradient(name, LAYER, group.rank))
    reducer.finish()
    return [parameter.grad for parameter in parameters.values()]


def sums_of_layers(ranks, _):
    names = [f"layer{number}" for number in range(ranks[0]["layers"])]
    return [sum(local_gradient(name, LAYER, rank) for rank in range(len(ranks))) for name in names]


def bytes_of_layers(arguments, copies):
    return copies * arguments["layers"] * 4 * torch.Size(LAYER).numel()


# Gradients are in the buckets only: no second copy is made for sending.
MANY_LAYERS = Declaration(
    inputs={"layers": Choices((2, 1))},
    call=step_of_layers,
    reference=sums_of_layers,
    replicas=True,
    growth=Growth(
        ({"layers": {"value": 8}}, {"layers": {"value": 16}}),
        peak_bytes=lambda arguments, ranks: bytes_of_layers(arguments, 2.2),  # the parameters, and their gradients
        kept_bytes=lambda arguments, ranks: bytes_of_layers(arguments, 1.2),  # the gradients
    ),
)


@test(points=4, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any dtype, size and bucket size, NaN and infinities, and a group of only some ranks; memory of one copy."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(MANY_LAYERS, answer, world, network)
