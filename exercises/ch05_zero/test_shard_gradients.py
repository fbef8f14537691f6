"""Tests of shard_gradients: whole numbers as gradients, and memory that is not written to holds NaN."""

import contextlib

import torch

from exercises.expected_shards import shard_elements, shard_values
from exercises.observations import LiveTensorMemory, timeline
from exercises.testing import Wrong, expect, test
from minidist.comm import GroupSpec, bind
from minidist.mesh import Mesh
from minidist.precision.dtypes import PrecisionDtypes
from minidist.zero.plan import lay_out_flat

# Together 23 elements: rows of 2, 3 and 4 ranks end in padding. In the order in which backward finishes them.
SHAPES = {"head": (3, 2), "norm": (3,), "up": (2, 5), "bias": (4,)}
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
FP32 = PrecisionDtypes(*[torch.float32] * 5)
KIB = 1024


@contextlib.contextmanager
def nothing_is_zero_by_chance():
    """torch.empty gives memory that is full of NaN. By this switch, since the public one imports half of torch."""
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def gradients_of(answer, group, replica_group=None, dtypes=FP32, sizes=SIZES):
    return answer.ShardedGradients(lay_out_flat(sizes, group.size), group, replica_group, dtypes, torch.device("cpu"))


def gradient(name, rank, micro_batch=0, step=0):
    """What one rank adds: whole numbers, of which a hundred sum up exactly in float32 and a few in bfloat16."""
    numbers = torch.arange(float(SIZES[name])).reshape(SHAPES[name])
    return numbers + 10 * rank + 3 * micro_batch + 7 * step + len(name)


def backward(gradients, rank, micro_batch=0, step=0, leave_out=()):
    """The backward of one micro-batch on this rank, up to the launch of its reduction."""
    for name in SHAPES:
        if name not in leave_out:
            whole = gradient(name, rank, micro_batch, step)
            gradients.accumulate(name, whole - 1)  # in two parts, as that of a tied parameter may come
            gradients.accumulate(name, torch.ones_like(whole))
    gradients.launch()


def finished(gradients):
    """The end of the step's backward; returns this rank's shard."""
    gradients.launch_final_reduction()
    gradients.wait()
    return gradients.result


def total(name, ranks, micro_batches, step=0, used=lambda name, rank, micro_batch: True):
    """The sum over ranks and micro-batches of all that was added."""
    found = torch.zeros(SHAPES[name])
    for rank in ranks:
        for micro_batch in range(micro_batches):
            if used(name, rank, micro_batch):
                found += gradient(name, rank, micro_batch, step)
    return found


def expect_shard(what, got, world, values):
    """This rank's shard of the row of these sums."""
    expect(what, got.tolist(), shard_values(shard_elements(SIZES, world.size)[world.rank], values))


@test(points=3, ranks=(1, 2, 3, 4))
def a_shard_of_the_sum(answer, world, network):
    """After each step every rank has its shard of the sum over ranks and micro-batches, and padding is zero."""
    with nothing_is_zero_by_chance():
        for micro_batches in (1, 3):
            gradients = gradients_of(answer, network.group)
            for step in range(2):
                for micro_batch in range(micro_batches):
                    backward(gradients, world.rank, micro_batch, step)
                what = f"the shard of rank {world.rank} in step {step + 1}, {micro_batches} micro-batches"

                def values(name, step=step, micro_batches=micro_batches):
                    return total(name, range(world.size), micro_batches, step)

                expect_shard(what, finished(gradients), world, values)
                gradients.clear()


@test(points=3, ranks=(2, 3))
def one_reduce_scatter_per_micro_batch(answer, world, network):
    """One reduce-scatter of the row for each micro-batch, and nothing else goes over the network."""
    gradients, padded = gradients_of(answer, network.group), len(sum(shard_elements(SIZES, world.size), []))
    for micro_batches in (1, 4):
        before = len(network.records)
        for micro_batch in range(micro_batches):
            backward(gradients, world.rank, micro_batch)
        finished(gradients)
        gradients.clear()
        sent = [[record.name, record.payload_bytes // 4] for record in network.records[before:]]
        wanted = [["reduce_scatter", padded]] * micro_batches
        expect(
            "what is sent: (operation, elements)",
            sent,
            wanted,
            case=f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}",
        )


@test(points=2, ranks=(2, 3))
def missing_gradients_count_as_zero(answer, world, network):
    """A gradient that did not come counts as zero; a rank without any takes part all the same."""

    def used(name, rank, micro_batch):
        return (rank != 1 or micro_batch == 1) and (name != "up" or (rank, micro_batch) == (0, 1))

    with nothing_is_zero_by_chance():
        gradients = gradients_of(answer, network.group)
        for micro_batch in range(3):
            absent = [name for name in SHAPES if not used(name, world.rank, micro_batch)]
            backward(gradients, world.rank, micro_batch, leave_out=absent)
        what = "the shard, where rank 1 has gradients in the second of three micro-batches only"
        expect_shard(what, finished(gradients), world, lambda name: total(name, range(world.size), 3, used=used))
        gradients.clear()
        expect("the shard after a step without a micro-batch", finished(gradients).count_nonzero(), 0)


@test(points=3, ranks=(2,))
def flat_gradient_is_freed(answer, world, network):
    """A row of full length is there while it is sent, not before; its shard from then on, to the end of the step."""
    sizes = {"up": 192 * KIB // 4, "bias": 64 * KIB // 4}  # one row of 256 KiB, shards of 128
    with LiveTensorMemory() as memory:
        flat_params = [gradients_of(answer, network.group, sizes=sizes) for _ in range(4)]
        for micro_batch in range(2):
            for number, gradients in enumerate(flat_params):  # the backward of one part of the model after the other
                case = f"four rows of 256 KiB, shards of 128; micro-batch {micro_batch + 1}, row {number + 1}"
                shards = 4 if micro_batch else number
                for name, come in (("bias", 64), ("up", 256)):
                    gradients.accumulate(name, torch.ones(sizes[name]))
                    what = f"KiB of gradients when {name} has come"
                    expect(what, memory.nbytes() // KIB, 128 * shards + come, case=case)
                gradients.launch()
                gradients.wait()
                shards = 4 if micro_batch else number + 1
                expect("KiB of gradients after wait()", memory.nbytes() // KIB, 128 * shards, case=case)
        for gradients in flat_params:
            expect("the sum of two micro-batches over two ranks", finished(gradients)[0].item(), 4.0)
            gradients.clear()
        expect("KiB of gradients after clear()", memory.nbytes() // KIB, 0, case="four rows of 256 KiB")


@test(points=2, ranks=(2,))
def reduction_overlaps_with_backward(answer, world, network):
    """launch() returns before the reduction has ended: what it sends is waited for later."""
    gradients = gradients_of(answer, network.group)
    for micro_batch in range(3):
        backward(gradients, world.rank, micro_batch)
        network.event(f"launched {micro_batch}")
    finished(gradients)
    network.event("finished")
    happened = timeline(network)
    for number in range(3):
        place, what = (
            happened.index(f"wait {number}") if f"wait {number}" in happened else -1,
            f"reduction {number + 1}",
        )
        if place < 0 or place > happened.index("finished"):
            raise Wrong(
                "wrong", f"when {what} of 3 is waited for", "before the step ends", "never", case="3 micro-batches"
            )
        if place < happened.index(f"launched {number}"):
            later = "after launch() has returned"
            raise Wrong("wrong", f"when {what} of 3 is waited for", later, "inside launch()", case="3 micro-batches")


@test(points=2, ranks=(4,))
def replicas_are_summed_once(answer, world, network):
    """Where two ranks hold the same shard (hybrid sharding), the shard is summed over them once a step, at its end."""
    uses = [GroupSpec("grads", ("cp",)), GroupSpec("replicas", ("dp",))]
    groups = bind(world, Mesh(dp=2, cp=2), uses)
    before = len(network.records)
    gradients = gradients_of(answer, groups["grads"], groups["replicas"])
    for micro_batch in range(2):
        backward(gradients, world.rank, micro_batch)
    got, mine = finished(gradients), shard_elements(SIZES, 2)[groups["grads"].rank]
    expect("the shard", got.tolist(), shard_values(mine, lambda name: total(name, range(4), 2)))
    sent = [[record.name, record.payload_bytes // 4] for record in network.records[before:]]
    expect(
        "what is sent: (operation, elements)",
        sent,
        [["reduce_scatter", 24], ["reduce_scatter", 24], ["all_reduce", 12]],
    )


@test(points=1, ranks=(2,))
def accumulates_in_the_given_dtype(answer, world, network):
    """Gradients come and travel in bfloat16, and are added up in float32, before and after; or all in float64."""
    dtypes = PrecisionDtypes(torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float32)
    gradients, before = gradients_of(answer, network.group, dtypes=dtypes), len(network.records)
    for micro_batch in range(9):
        for name in SHAPES:  # 256, then ones: a sum in bfloat16 would stay at 256
            for part in (1.0,) if micro_batch else (256.0, 1.0, 1.0):
                gradients.accumulate(name, torch.full(SHAPES[name], part).bfloat16())
        gradients.launch()
    got = finished(gradients)
    expect("the format of the shard", str(got.dtype), "torch.float32")
    wanted = shard_values(shard_elements(SIZES, 2)[world.rank], lambda name: torch.full(SHAPES[name], 532.0))
    expect("256 and ten ones from each of two ranks", got.tolist(), wanted)
    expect("the format on the wire", sorted({str(r.dtype) for r in network.records[before:]}), ["torch.bfloat16"])
    gradients, exact = gradients_of(answer, network.group, dtypes=PrecisionDtypes(*[torch.float64] * 5)), 1 + 2.0**-40
    for name in SHAPES:
        gradients.accumulate(name, torch.full(SHAPES[name], exact, dtype=torch.float64))
    gradients.launch()
    wanted = shard_values(
        shard_elements(SIZES, 2)[world.rank],
        lambda name: torch.full(SHAPES[name], 2 * exact, dtype=torch.float64),
    )
    expect("the sum of what float32 has no room for", finished(gradients).tolist(), wanted)
