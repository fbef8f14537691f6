"""Tests of stage_one_step: the package's reducer with the learner's rows, and an update by hand with exact numbers."""

import torch
from torch import nn

from exercises.expected_shards import shard_elements, shard_values
from exercises.observations import LiveTensorMemory, timeline
from exercises.testing import expect, test
from minidist.precision.dtypes import PrecisionDtypes
from minidist.zero.plan import lay_out_flat
from minidist.zero.reducer import ReducedFlatParam, ZeroReducer

# Two rows, in the order in which backward finishes them. No length divides by 2 or 4; the second one's does by 3.
ROWS = [{"head": (3, 2), "norm": (3,)}, {"up": (2, 5), "bias": (4,), "embed": (7,)}]
SHAPES = {name: shape for row in ROWS for name, shape in row.items()}
FP32 = PrecisionDtypes(*[torch.float32] * 5)
MIXED = PrecisionDtypes(torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32)
RATE = 0.5
KIB = 1024


def sizes(row):
    return {name: torch.Size(shape).numel() for name, shape in row.items()}


def start(name, rank):
    """Where a parameter starts on a rank: nowhere the same."""
    return torch.arange(float(torch.Size(SHAPES[name]).numel())).reshape(SHAPES[name]) + 100 * rank - len(name)


def gradient(name, rank, micro_batch=0, step=0):
    """What one rank adds: whole numbers."""
    numbers = torch.arange(float(torch.Size(SHAPES[name]).numel())).reshape(SHAPES[name])
    return numbers * (1 + rank) + 3 * micro_batch + 7 * step + len(name)


def reducer_of(answer, world, network, dtypes=FP32, rows=ROWS, begin=start):
    """The package's reducer over the learner's rows and gradients, and the parameters."""
    members, parameters, group = [], {}, network.group
    for row in rows:
        values = {name: begin(name, world.rank) for name in row}
        held = {name: nn.Parameter(value.to(dtypes.parameter, copy=True)) for name, value in values.items()}
        layout = lay_out_flat({name: value.numel() for name, value in values.items()}, group.size)
        flat_param = answer.FlatParam(held, values, layout, group, dtypes)
        gradients = answer.FullGradients(layout, group, None, dtypes, flat_param.full_buffer.device)
        members.append(ReducedFlatParam(flat_param, gradients))
        parameters |= held
    return ZeroReducer(members, [], list(parameters), {}, reduces_each_micro_batch=False), parameters


def reduce(reducer, network, rank, micro_batches=1, step=0, leave_out=()):
    """Forward and backward of all micro-batches: gradients are passed to the reducer and summed over the ranks."""
    for micro_batch in range(micro_batches):
        for name in SHAPES:
            if name not in leave_out:
                reducer.accumulate(name, gradient(name, rank, micro_batch, step))
            if micro_batch == micro_batches - 1:
                network.event(f"ready {name}")
                reducer.mark_ready(name)
    network.event("backward is over")
    reducer.finish_reductions()


def update(reducer, step=0):
    """Every master minus half of its gradient."""
    reducer.exclude_unused([1.0] * len(reducer.used_flags))
    with torch.no_grad():
        for group in reducer.groups_to_update():
            reducer.attach_grads(group)
            for master in reducer.masters.values():
                if master.grad is not None:
                    master -= RATE * master.grad
            reducer.copy_to_params(group, step)


def run_step(reducer, network, rank, **how):
    reduce(reducer, network, rank, **how)
    update(reducer, how.get("step", 0))
    reducer.gather_params()
    reducer.clear_gradients()


def trained(name, size, micro_batches, steps, used=lambda name, rank, step: True):
    """A parameter after some steps: each element starts as on the rank whose shard it lies in."""
    row = next(row for row in ROWS if name in row)
    place = {
        element: rank for rank, shard in enumerate(shard_elements(sizes(row), size)) for element in shard if element
    }
    found = [start(name, place[name, index]).flatten()[index] for index in range(torch.Size(SHAPES[name]).numel())]
    found = torch.stack(found).reshape(SHAPES[name])
    for step in range(steps):
        for rank in range(size):
            for micro_batch in range(micro_batches):
                if used(name, rank, step):
                    found -= RATE * gradient(name, rank, micro_batch, step)
    return found


@test(points=2, ranks=(1, 3))
def parameters_are_views(answer, world, network):
    """A parameter keeps its numbers and is a view of the row; bounds are where its elements are in the shard."""
    for row in ROWS:
        parameters = {name: nn.Parameter(start(name, world.rank)) for name in row}
        layout = lay_out_flat(sizes(row), world.size)
        flat_param = answer.FlatParam(parameters, {name: start(name, 0) for name in row}, layout, network.group, FP32)
        for name, parameter in parameters.items():
            expect(f"the parameter {name}, laid into the row", parameter.detach(), start(name, world.rank))
            same = parameter.untyped_storage().data_ptr() == flat_param.full_buffer.untyped_storage().data_ptr()
            expect(f"whether the parameter {name} is a view of the row", same, True)
        expect(
            "whether the row takes a gradient: it is memory, and no part of a graph",
            flat_param.full_buffer.requires_grad,
            False,
        )
        shards = shard_elements(sizes(row), world.size)
        whole = [number for shard in shards for number in shard_values(shard, lambda name: start(name, world.rank))]
        expect("the row", flat_param.full_buffer.tolist(), whole)
        mine, wanted = shards[world.rank], {}
        for place, element in enumerate(mine):
            if element:
                wanted[element[0]] = [wanted.get(element[0], [place])[0], place + 1]
        expect(
            f"bounds in the shard {mine}", {name: list(ends) for name, ends in flat_param.param_bounds.items()}, wanted
        )


@test(points=5, ranks=(1, 2, 3, 4))
def two_steps_of_training(answer, world, network):
    """After each step every rank has all parameters, each element updated by the rank whose shard it lies in."""
    reducer, parameters = reducer_of(answer, world, network)
    for step in range(2):
        run_step(reducer, network, world.rank, micro_batches=2, step=step)
        for name in SHAPES:
            what = f"the parameter {name} after step {step + 1}"
            expect(what, parameters[name].detach(), trained(name, world.size, 2, step + 1), case="2 micro-batches")


@test(points=3, ranks=(2, 3))
def two_messages_per_flat_param(answer, world, network):
    """In a step each row is reduce-scattered once and gathered once, whatever the number of micro-batches."""
    reducer, _ = reducer_of(answer, world, network)
    padded = [len(sum(shard_elements(sizes(row), world.size), [])) for row in ROWS]
    for micro_batches in (1, 3):
        before = len(network.records)
        run_step(reducer, network, world.rank, micro_batches=micro_batches)
        sent = [[record.name, record.payload_bytes // 4] for record in network.records[before:]]
        wanted = [[name, numel] for name in ("reduce_scatter", "all_gather") for numel in padded]
        expect(
            "what is sent: (operation, elements)",
            sent,
            wanted,
            case=f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}",
        )


@test(points=2, ranks=(2,))
def launches_all_before_waiting(answer, world, network):
    """Reductions are launched inside backward and waited for after it; gathers all launched, then waited for."""
    reducer, _ = reducer_of(answer, world, network)
    run_step(reducer, network, world.rank)
    happened = timeline(network)
    over = happened.index("backward is over")
    inside = [event for event in happened[:over] if not event.startswith("ready")]
    expect("what happens inside backward", inside, ["launch 0", "launch 1"])
    expect("what happens after it", happened[over + 1 :], [
        "wait 0", "wait 1", "launch 2", "launch 3", "wait 2", "wait 3",
    ])  # fmt: skip


@test(points=2, ranks=(2,))
def missing_gradient_counts_as_zero(answer, world, network):
    """Where a rank has no gradient for a parameter it adds zero, not what was there in the step before."""

    def used(name, rank, step):
        return step == 0 or name not in ("norm", "up") or rank == 1

    reducer, parameters = reducer_of(answer, world, network)
    for step in range(2):
        absent = [name for name in SHAPES if not used(name, world.rank, step)]
        run_step(reducer, network, world.rank, step=step, leave_out=absent)
    for name in SHAPES:
        case = "in step 2 rank 0 has no gradient for norm and up"
        expect(f"the parameter {name}", parameters[name].detach(), trained(name, world.size, 1, 2, used), case=case)


@test(points=2, ranks=(2,))
def no_extra_memory(answer, world, network):
    """Parameters take one row and gradients another; neither the reduction nor the update nor the gather takes more."""
    rows = [{"weight": (64, KIB)}]  # 256 KiB
    with LiveTensorMemory() as memory:
        reducer, parameters = reducer_of(
            answer, world, network, rows=rows, begin=lambda name, rank: torch.ones(64, KIB)
        )
        expect("KiB of a flat parameter and a flat gradient", memory.nbytes() // KIB, 512)
        grad = torch.ones(64, KIB)
        reducer.accumulate("weight", grad)
        del grad
        reducer.mark_ready("weight")
        expect("KiB while the flat parameter is in flight", memory.nbytes() // KIB, 512)
        reducer.finish_reductions()
        expect("KiB when it is reduced", memory.nbytes() // KIB, 512)
        update(reducer)
        reducer.gather_params()
        expect("KiB after the step", memory.nbytes() // KIB, 512)
    expect("the first element", parameters["weight"][0, 0].item(), 0.0)


@test(points=2, ranks=(2,))
def keeps_every_dtype(answer, world, network):
    """bfloat16 computes and travels, float32 adds up and is updated: what is small for one is not lost in the other."""
    reducer, parameters = reducer_of(
        answer, world, network, MIXED, begin=lambda name, rank: torch.full(SHAPES[name], 256.0)
    )
    for steps in (1, 2):
        for name, shape in SHAPES.items():
            for addend in (0.5, 2.0**-9, -(2.0**-9)):  # bfloat16 has no room for the sum of the first two
                reducer.accumulate(name, torch.full(shape, addend).bfloat16())
            reducer.mark_ready(name)
        reducer.finish_reductions()
        dtypes = {str(result.dtype) for result in reducer.gradients().values()}
        expect("the dtype of summed gradients", sorted(dtypes), ["torch.float32"])
        update(reducer)
        reducer.gather_params()
        reducer.clear_gradients()
        wanted = {1: 256.0, 2: 255.0}[steps]  # 255.5 is none of bfloat16's numbers, and 256 the even neighbour
        for name, shape in SHAPES.items():
            got = parameters[name].detach().float()
            expect(f"{name} after step {steps}, minus 0.5 in each", got, torch.full(shape, wanted))
    sent = {f"{record.name} {str(record.dtype).removeprefix('torch.')}" for record in network.records}
    expect("what is sent, and in which dtype", sorted(sent), ["all_gather bfloat16", "reduce_scatter bfloat16"])
