"""Tests of zero_stage_two: as those of zero_stage_one, and what is in memory while backward runs."""

from exercises.observations import LiveTensorMemory
from exercises.testing import expect, expect_raises, test
from exercises.zero_run import (
    TOLERANCE,
    WIDTH,
    Reference,
    Replica,
    batches,
    expect_about,
    expect_equals_one_process,
    expect_sent,
    loss_of,
    own_elements,
    padded_elements,
)


@test(points=5, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """After each step all ranks have the parameters of AdamW on the whole model; ranks start from other values."""
    expect_equals_one_process(answer.ZeroStage2, network.group, world.size)


@test(points=2, ranks=(1, 3))
def micro_batches_add_up(answer, world, network):
    """With 1, 2 and 4 micro-batches the reduced gradients are the sums over all of them, and over all ranks."""
    own = own_elements(world.size, world.rank, Replica(answer.ZeroStage2, network.group).model)
    for count in (1, 2, 4):
        mine, one = Replica(answer.ZeroStage2, network.group), Reference(world.size)
        mine.run_backward(0, count)
        mine.zero.finish_reductions()
        wanted = one.gradients(0, count)
        for name, gradient in mine.zero.gradients().items():
            expected = None if wanted[name] is None else wanted[name].flatten()[own[name]]
            case = f"{count} micro-batch{'es' * (count > 1)}"
            expect(f"the gradient of {name}", gradient, expected, case=case, tolerance=TOLERANCE)


@test(points=4, ranks=(2,))
def full_gradients_of_one_block(answer, world, network):
    """When the backward of a block begins, the gradients of the blocks behind it are shards; after it, all are."""
    with LiveTensorMemory() as memory:
        mine = Replica(answer.ZeroStage2, network.group, WIDTH)
        model = memory.nbytes()
        block, seen = sum(p.numel() for p in mine.model.layers[0].parameters()) * 8, []
        for layer in mine.model.layers:
            layer.down.register_full_backward_pre_hook(lambda *_: seen.append(memory.nbytes()))
        for micro_batch in (1, 2):
            seen.clear()
            loss_of(mine.model, batches(0, world.rank, world.size, 1)[0][:1]).backward()
            before = model + (3 * block // 2 if micro_batch == 2 else 0)
            for done, got in enumerate(seen):
                wanted = before + (done * block // 2 if micro_batch == 1 else 0)
                expect_about(f"after the backward of {done} of 3 blocks, micro-batch {micro_batch}", got, wanted)
            mine.zero.finish_micro_batch()
            expect_about(f"after micro-batch {micro_batch}", memory.nbytes(), model + 3 * block // 2)
        mine.zero.step(mine.optimizer)
        expect_about("after the step", memory.nbytes(), 2 * model)


@test(points=3, ranks=(2, 3, 4))
def one_reduce_scatter_per_micro_batch(answer, world, network):
    """k micro-batches send k reduce-scatters of each flat parameter, and one all-gather after the update."""
    mine = Replica(answer.ZeroStage2, network.group)
    numel = sum(padded_elements(world.size, mine.model))
    for step, count in enumerate((1, 2, 4)):
        with expect_sent(mine, network, [(count + 1) * numel] * 2, f"{count} micro-batch{'es' * (count > 1)}"):
            mine.train(step, count)


@test(points=2, ranks=(2,))
def late_gradients_are_refused(answer, world, network):
    """A gradient of a block whose backward is over raises RuntimeError; the next micro-batch may have one again."""
    mine, happened = Replica(answer.ZeroStage2, network.group), []

    def late(*_):
        gradient = mine.model.layers[2].gate.detach().clone()
        happened.append(expect_raises(RuntimeError, mine.zero.accumulate, "layers.2.gate", gradient))

    mine.model.layers[1].down.register_full_backward_pre_hook(late)
    for _ in range(2):
        loss_of(mine.model, batches(0, world.rank, world.size, 1)[0]).backward()
        mine.zero.finish_micro_batch()
    expect("how often a late gradient was refused", len(happened), 2)
    mine.zero.step(mine.optimizer)
