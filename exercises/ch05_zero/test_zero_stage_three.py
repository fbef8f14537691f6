"""Tests of zero_stage_three: as those of zero_stage_two, and which parameters have memory while the model runs."""

import torch

from exercises.observations import LiveTensorMemory
from exercises.testing import expect, test
from exercises.zero_run import (
    TOLERANCE,
    WIDTH,
    Reference,
    Replica,
    batches,
    expect_about,
    expect_sent,
    loss_of,
    own_elements,
    padded_elements,
)


@test(points=7, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """Each step updates the masters as AdamW does on the whole model, and the model computes with what was gathered."""
    mine, one = Replica(answer.ZeroStage3, network.group), Reference(world.size, gathers_first=True)
    own, data = own_elements(world.size, world.rank, mine.model), batches(7, 0, 1, 1)[0]
    for step in range(3):
        with torch.no_grad():
            got, wanted, case = mine.model(data), one.model(data), f"before step {step + 1}"
            expect("the output of the model on each rank", got, wanted, case=case, tolerance=TOLERANCE)
        mine.train(step)
        one.train(step)
        for name, value in one.values().items():
            if name in own:
                got, case = mine.zero.masters[name].detach(), "2 micro-batches per step"
                wanted = value.flatten()[own[name]]
                expect(f"the master of {name} after step {step + 1}", got, wanted, case=case, tolerance=TOLERANCE)
    mine.zero.gather_all()
    for name, parameter in mine.model.named_parameters():
        case = "after gather_all"
        expect(f"the parameter {name}", parameter.detach(), one.values()[name], case=case, tolerance=TOLERANCE)


@test(points=6, ranks=(2,))
def memory_of_one_block(answer, world, network):
    """While a block runs, forward or backward, only its parameters are full; between steps there are shards only."""
    with LiveTensorMemory() as memory:
        mine = Replica(answer.ZeroStage3, network.group, WIDTH)
        model = sum(parameter.numel() for parameter in mine.model.parameters()) * 8
        block, seen = sum(p.numel() for p in mine.model.layers[0].parameters()) * 8, []
        shards = model // 2
        expect_about("before the first step", memory.nbytes(), shards)
        for layer in mine.model.layers:
            layer.down.register_forward_pre_hook(lambda *_: seen.append(memory.nbytes()))
            layer.down.register_full_backward_pre_hook(lambda *_: seen.append(memory.nbytes()))
        for step in range(2):
            states = shards * 2 * step
            for micro_batch in (1, 2):
                seen.clear()
                loss_of(mine.model, batches(0, world.rank, world.size, 1)[0][:1]).backward()
                told = f"step {step + 1}, micro-batch {micro_batch}"
                for number, got in enumerate(seen):
                    reduced = 3 if micro_batch == 2 else max(0, number - 3)
                    when = f"in the {'forward' if number < 3 else 'backward'} of block {(0, 1, 2, 2, 1, 0)[number]}"
                    expect_about(f"{when}, {told}", got, shards + states + block + reduced * block // 2)
                mine.zero.finish_micro_batch()
                expect_about(f"after {told}", memory.nbytes(), 2 * shards + states)
            mine.zero.step(mine.optimizer)
            expect_about(f"after step {step + 1}", memory.nbytes(), 3 * shards)
        with torch.no_grad():
            mine.model(batches(0, 0, 1, 1)[0][:1])
        expect_about("after a forward without a backward", memory.nbytes(), 3 * shards)
        mine.zero.gather_all()
        expect_about("after gather_all", memory.nbytes(), 3 * shards + model)


@test(points=4, ranks=(2, 3, 4))
def at_most_two_gathers(answer, world, network):
    """Each micro-batch gathers a flat parameter at most twice and reduces it once; after the update nothing is sent."""
    mine = Replica(answer.ZeroStage3, network.group)
    numel = sum(padded_elements(world.size, mine.model))
    for step, count in enumerate((1, 2, 4)):
        case = f"{count} micro-batch{'es' * (count > 1)}"
        with expect_sent(mine, network, [2 * count * numel, 3 * count * numel], case):
            mine.train(step, count)


@test(points=3, ranks=(2, 3))
def gathers_before_each_use(answer, world, network):
    """Every gather and reduction comes inside forward or backward; none is left for the update."""
    mine = Replica(answer.ZeroStage3, network.group)
    data = batches(0, world.rank, world.size, 1)[0]
    for _ in range(2):
        before = len(network.records)
        with torch.no_grad():
            mine.model(data)
        gathers = [record.name for record in network.records[before:]]
        expect("what a forward sends", gathers, ["all_gather"] * 4, case="3 blocks, and the other parameters")
        loss_of(mine.model, data).backward()
        mine.zero.finish_micro_batch()
        mine.zero.finish_reductions()
        before = len(network.records)
        mine.optimizer.step()
        mine.zero.gather_params()
        mine.zero.clear_gradients()
        expect("messages of the update", len(network.records) - before, 0)
