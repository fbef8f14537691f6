"""Tests of zero_stage_three: as those of zero_stage_two, and which parameters have memory while the model runs."""

from collections import Counter

import torch

from exercises.conditions import check_conditions
from exercises.observations import LiveTensorMemory
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.zero_run import (
    LAYERS,
    TOLERANCE,
    WIDTH,
    FullyShardedReplica,
    Reference,
    batches,
    declare_step,
    expect_about,
    expect_freed,
    expect_sent,
    expect_step_without_root,
    loss_of,
    own_elements,
    padded_elements,
)

# Block by block in forward and then in backward: which blocks have memory while it computes.
WITH_PREFETCH = [[0, 1], [1, 2], [2], [1, 2], [0, 1], [0]]
WITHOUT_PREFETCH = [[0], [1], [2], [2], [1], [0]]


def blocks_with_memory(zero) -> list[int]:
    return [index for index, flat in enumerate(zero.blocks) if flat.full.untyped_storage().nbytes()]


@test(points=5, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """Each step updates the masters as AdamW does on the whole model, and the model computes with what was gathered."""
    for prefetch in (True, False):
        mine = FullyShardedReplica(answer.ZeroStage3, network.group, prefetch=prefetch)
        one = Reference(world.size, gathers_first=True)
        own, data = own_elements(world.size, world.rank, mine.model), batches(7, 0, 1, 1)[0]
        for step in range(3):
            with torch.no_grad():
                mine.zero.gather_root()
                got, wanted, case = mine.model(data), one.model(data), f"before step {step + 1}, prefetch={prefetch}"
                mine.zero.free_root()
                expect("the output of the model on each rank", got, wanted, case=case, tolerance=TOLERANCE)
            mine.train(step)
            one.train(step)
            for name, value in one.values().items():
                if name in own:
                    got, case = mine.zero.masters[name].detach(), f"2 micro-batches per step, prefetch={prefetch}"
                    wanted = value.flatten()[own[name]]
                    expect(f"the master of {name} after step {step + 1}", got, wanted, case=case, tolerance=TOLERANCE)


@test(points=4, ranks=(2,))
def memory_of_the_blocks_in_use(answer, world, network):
    """Between steps there are shards only; a block that computes has its parameters, and the next one with prefetch."""
    for prefetch, expected in ((False, WITHOUT_PREFETCH), (True, WITH_PREFETCH)):
        with LiveTensorMemory() as memory:
            mine = FullyShardedReplica(answer.ZeroStage3, network.group, WIDTH, prefetch=prefetch)
            model = sum(parameter.numel() for parameter in mine.model.parameters()) * 8
            block = sum(parameter.numel() for parameter in mine.model.layers[0].parameters()) * 8
            seen: list[int] = []
            sharded, told = model, f"prefetch={prefetch}"  # half the parameters and half the gradients
            expect_about(f"before the first step, {told}", memory.nbytes(), sharded)
            for layer in mine.model.layers:
                layer.down.register_forward_pre_hook(lambda *_, to=seen: to.append(memory.nbytes()))
                layer.down.register_full_backward_pre_hook(lambda *_, to=seen: to.append(memory.nbytes()))
            for step in range(2):
                states = model * step
                mine.zero.clear()
                mine.zero.gather_root()
                for micro_batch in (1, 2):
                    seen.clear()
                    loss_of(mine.model, batches(0, world.rank, world.size, 1)[0][:1]).backward()
                    for number, (got, blocks) in enumerate(zip(seen, expected, strict=True)):
                        when = f"in the {'forward' if number < 3 else 'backward'} of block {(0, 1, 2, 2, 1, 0)[number]}"
                        case = f"{when}, micro-batch {micro_batch} of step {step + 1}, {told}"
                        expect_about(case, got, sharded + states + len(blocks) * block)
                    mine.zero.end_micro_batch()
                    case = f"after micro-batch {micro_batch} of step {step + 1}, {told}"
                    expect_about(case, memory.nbytes(), sharded + states)
                mine.zero.finish()
                expect_freed(mine.zero, f"after finish, step {step + 1}, {told}")
                mine.optimizer.step()
                mine.zero.update_parameters()
                expect_about(f"after step {step + 1}, {told}", memory.nbytes(), sharded + model)
                expect_freed(mine.zero, f"between two steps, {told}")


@test(points=4, ranks=(2, 3, 4))
def two_gathers_of_each_block(answer, world, network):
    """A micro-batch gathers each block twice and reduces it once; a step gathers and reduces the root once."""
    for prefetch in (True, False):
        mine = FullyShardedReplica(answer.ZeroStage3, network.group, prefetch=prefetch)
        *blocks, root = padded_elements(world.size, mine.model)
        for step, count in enumerate((1, 2, 4)):
            case = f"{count} micro-batch{'es' * (count > 1)}, prefetch={prefetch}"
            start = len(network.records)
            with expect_sent(mine, network, 3 * count * sum(blocks) + 2 * root, case):
                mine.run_backward(step, count)
                mine.zero.finish()
                launched = Counter(record.name for record in network.records[start:])
            before = len(network.records)
            mine.optimizer.step()
            mine.zero.update_parameters()
            expect("collectives of the update", len(network.records) - before, 0, case=case)
            for name, number in (("all_gather", 2 * count * LAYERS + 1), ("reduce_scatter", count * LAYERS + 1)):
                expect(f"the number of {name} operations in a step", launched[name], number, case=case)


@test(points=4, ranks=(1, 2, 3))
def next_block_in_flight(answer, world, network):
    """A block computes with its own parameters complete; with prefetch, while the next block's are in flight."""
    for prefetch, expected in ((True, WITH_PREFETCH), (False, WITHOUT_PREFETCH)):
        mine, seen = FullyShardedReplica(answer.ZeroStage3, network.group, prefetch=prefetch), []

        def look(*_, zero=mine.zero, seen=seen):
            gathers = [record for record in network.records if record.name == "all_gather"]
            seen.append((blocks_with_memory(zero), sum(record.waited is None for record in gathers)))

        for layer in mine.model.layers:
            layer.up.register_forward_pre_hook(look)
            layer.down.register_full_backward_pre_hook(look)
        for step in range(2):
            seen.clear()
            mine.train(step, 1)
            case = f"each block in forward, then in backward, prefetch={prefetch}, step {step + 1}"
            expect("the blocks that have memory", [blocks for blocks, _ in seen], expected, case=case)
            flights = [(len(blocks) - 1) * (world.size > 1) for blocks in expected]
            expect("the number of all-gathers in flight", [number for _, number in seen], flights, case=case)


@test(points=3, ranks=(1, 2))
def freed_after_an_evaluation(answer, world, network):
    """`free_root` frees the root, and a block that was gathered ahead and not used; the next step gathers again."""
    mine, seen = FullyShardedReplica(answer.ZeroStage3, network.group), []
    data = batches(0, world.rank, world.size, 1)[0]
    for layer in mine.model.layers:
        layer.up.register_forward_pre_hook(lambda *_: seen.append(blocks_with_memory(mine.zero)))
    mine.model.eval()
    for _ in range(2):
        seen.clear()
        with torch.no_grad():
            mine.zero.gather_root()
            first = mine.model(data)
            case = "an evaluation: each block in forward, under no_grad and in eval mode"
            expect("the blocks that have memory", seen, WITH_PREFETCH[:LAYERS], case=case)
            second = mine.model(data)
        expect("the output of a second forward", second, first)
        expect("the blocks that have memory after a forward", blocks_with_memory(mine.zero), [])
        mine.zero.gather_block(0, 1)
        expect("the blocks that have memory after gather_block(0, 1)", blocks_with_memory(mine.zero), [0, 1])
        mine.zero.free_root()
        expect_freed(mine.zero, "after free_root")
        waiting = [record.name for record in network.records if record.waited is None]
        expect("collectives that nobody waited for", waiting, [])


@test(points=1, ranks=(1, 2))
def needs_no_root(answer, world, network):
    """A pipeline stage whose parameters are all in blocks has no root: there is none to gather, reduce or free."""
    expect_step_without_root(answer.ZeroStage3, network.group)


DECLARATION = declare_step(
    lambda answer, group, width: FullyShardedReplica(answer.ZeroStage3, group, width),
    gathers_first=True,
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """A step on 1 to 7 ranks and in a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
