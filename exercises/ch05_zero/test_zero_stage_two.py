"""Tests of zero_stage_two: as those of zero_stage_one, and what is in memory and sent while backward runs."""

from collections import Counter

import torch

from exercises.conditions import check_conditions
from exercises.observations import LiveTensorMemory
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.zero_run import (
    LAYERS,
    WIDTH,
    Reference,
    Replica,
    batches,
    declare_step,
    expect_about,
    expect_equals_one_process,
    expect_gradients,
    expect_sent,
    expect_step_without_root,
    loss_of,
    names_by_block,
    padded_elements,
)


@test(points=4, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """After each step all ranks have the parameters of AdamW on the whole model; ranks start from other values."""
    expect_equals_one_process(answer.ZeroStage2, network.group, world.size)


@test(points=2, ranks=(1, 3))
def micro_batches_add_up(answer, world, network):
    """With 1, 2 and 4 micro-batches the reduced gradients are the sums over all of them, and over all ranks."""
    mine, one = Replica(answer.ZeroStage2, network.group), Reference(world.size)
    for count in (1, 2, 4):
        mine.run_backward(0, count)
        mine.zero.finish()
        expect_gradients(mine, one.gradients(0, count), f"{count} micro-batch{'es' * (count > 1)}")


@test(points=4, ranks=(2,))
def full_gradients_of_one_block(answer, world, network):
    """When the backward of a block begins, and after each micro-batch, no block has full gradients."""
    with LiveTensorMemory() as memory:
        mine = Replica(answer.ZeroStage2, network.group, WIDTH)
        sharded, seen = memory.nbytes(), []
        model = sum(parameter.numel() for parameter in mine.model.parameters()) * 8
        for layer in mine.model.layers:
            layer.down.register_full_backward_pre_hook(lambda *_: seen.append(memory.nbytes()))
        for step in range(2):
            mine.zero.clear()
            states = model * step
            for micro_batch in (1, 2):
                seen.clear()
                loss_of(mine.model, batches(0, world.rank, world.size, 1)[0][:1]).backward()
                for done, got in enumerate(seen):
                    when = f"after the backward of {done} of 3 blocks, micro-batch {micro_batch} of step {step + 1}"
                    expect_about(when, got, sharded + states)
                mine.zero.end_micro_batch()
                expect_about(f"after micro-batch {micro_batch} of step {step + 1}", memory.nbytes(), sharded + states)
            mine.zero.finish()
            mine.optimizer.step()
            mine.zero.update_parameters()


@test(points=3, ranks=(2, 3, 4))
def one_reduce_scatter_per_micro_batch(answer, world, network):
    """k micro-batches send k reduce-scatters of each block and one of the root, and one all-gather of each."""
    mine = Replica(answer.ZeroStage2, network.group)
    *blocks, root = padded_elements(world.size, mine.model)
    for step, count in enumerate((1, 2, 4)):
        elements, case = (count + 1) * sum(blocks) + 2 * root, f"{count} micro-batch{'es' * (count > 1)}"
        before = len(network.records)
        with expect_sent(mine, network, elements, case):
            mine.train(step, count)
            launched = Counter(record.name for record in network.records[before:])
        for name, number in (("reduce_scatter", count * LAYERS + 1), ("all_gather", LAYERS + 1)):
            expect(f"the number of {name} operations in a step", launched[name], number, case=case)


class Reductions:
    """Follows which blocks a reducer reduces after `clear`, when every gradient that is added consists of ones."""

    def __init__(self, zero, network, world):
        self.zero, self.network, self.world = zero, network, world
        self.launched, self.sums = self.count(), [0.0] * LAYERS
        self.begin()

    def begin(self) -> None:
        """Begin a micro-batch: all blocks are pending."""
        self.pending = list(range(LAYERS))

    def count(self) -> int:
        """Return how many reduce-scatters have been launched."""
        return sum(record.name == "reduce_scatter" for record in self.network.records)

    def expect(self, blocks: list[int], when: str, is_at_end: bool = False) -> None:
        """Fail unless these blocks have been reduced since the last call, and `pending` lists the others.

        is_at_end: between two micro-batches, where `pending` may already list all blocks.
        """
        launched = self.count()
        wanted = len(blocks) * (self.world.size > 1)
        expect(f"the number of reduce-scatters {when}", launched - self.launched, wanted)
        self.launched = launched
        for index in blocks:
            self.sums[index] += self.world.size
            self.pending.remove(index)
        sums = [float(flat.grad[0]) for flat in self.zero.blocks]
        expect(f"the first element of each block's summed gradient {when}", sums, self.sums)
        if is_at_end:
            return
        pending = [index for index, flat in enumerate(self.zero.blocks) if any(p is flat for p in self.zero.pending)]
        expect(f"the numbers of the blocks in `pending` {when}", pending, self.pending)


@test(points=3, ranks=(1, 2))
def reduced_from_the_last_block_on(answer, world, network):
    """Each block is reduced when its last gradient is added, unless a later block waits; then after that one."""
    mine = Replica(answer.ZeroStage2, network.group)
    *blocks, root = names_by_block(mine.model)
    parameters, zero = dict(mine.model.named_parameters()), mine.zero

    def add(names):
        for name in names:
            zero.add(name, torch.ones_like(parameters[name]))

    zero.clear()
    reductions = Reductions(zero, network, world)
    for turn in ("first", "second"):
        where = f"in the {turn} micro-batch"
        reductions.begin()
        add(reversed(blocks[2][1:]))
        reductions.expect([], f"before the last gradient of block 2, {where}")
        add(blocks[2][:1])
        reductions.expect([2], f"after the last gradient of block 2, {where}")
        add(root)
        add(blocks[0])
        reductions.expect([], f"after all gradients of block 0, and before those of block 1, {where}")
        add(blocks[1])
        reductions.expect([1, 0], f"after all gradients of block 1, {where}")
        expect(f"the names in `local` before the end {where}", sorted(zero.local), sorted(root))
        zero.end_micro_batch()
        reductions.expect([], f"at the end {where}", is_at_end=True)
    reductions.begin()
    add(blocks[2][1:])
    add(blocks[1])
    reductions.expect([], "after all gradients of block 1 and some of block 2, in the third micro-batch")
    zero.end_micro_batch()
    got = [float(flat.grad[0]) for flat in zero.blocks]
    # Of block 2 only rank 0's shard begins with the parameter that got no gradient.
    is_added = [False, True, world.rank > 0]
    wanted = [total + world.size * added for total, added in zip(reductions.sums, is_added, strict=True)]
    expect("the first element of each block's summed gradient after the third micro-batch", got, wanted)
    reductions.begin()
    reductions.launched, reductions.sums = reductions.count(), wanted
    add(blocks[2][:1])
    reductions.expect([], "after one gradient of block 2; the micro-batch before ended with the others")
    add(blocks[2][1:])
    reductions.expect([2], "after all gradients of block 2, in the fourth micro-batch")
    zero.end_micro_batch()
    zero.finish()
    expect("the first element of the root's summed gradient", float(zero.root.grad[0]), 2.0 * world.size)
    for when in ("in an aborted step", "in the step after an aborted one"):
        zero.clear()
        reductions = Reductions(zero, network, world)
        add(blocks[2])
        reductions.expect([2], f"after the last gradient of block 2, {when}")
        add(blocks[1][1:])  # which the next step must not count
    zero.clear()
    reductions = Reductions(zero, network, world)
    add(blocks[2])
    add(blocks[1][:1])
    reductions.expect([2], "after block 2 and one gradient of block 1; the step before ended with the others")


@test(points=1, ranks=(1, 2))
def needs_no_root(answer, world, network):
    """A pipeline stage whose parameters are all in blocks has no root: a step reduces its blocks."""
    expect_step_without_root(answer.ZeroStage2, network.group)


DECLARATION = declare_step(
    lambda answer, group, width: Replica(answer.ZeroStage2, group, width),
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """A step on 1 to 7 ranks and in a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
