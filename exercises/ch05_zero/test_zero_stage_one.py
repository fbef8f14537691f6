"""Tests of zero_stage_one: the training of a small model on all ranks against one process in float64."""

import math
from collections import Counter

import torch
from torch import nn

from exercises.conditions import check_conditions
from exercises.observations import LiveTensorMemory
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.zero_run import (
    LAYERS,
    WIDTH,
    Reference,
    Replica,
    blocks_of,
    declare_step,
    expect_about,
    expect_equals_one_process,
    expect_gradients,
    expect_sent,
    names_by_block,
    own_elements,
    padded_elements,
)
from minidist.comm import all_gather_object


@test(points=5, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """After each step all ranks have the parameters of AdamW on the whole model; ranks start from other values."""
    expect_equals_one_process(answer.ZeroStage1, network.group, world.size)


@test(points=2, ranks=(1, 2, 3, 4))
def gradients_are_sums_of_own_elements(answer, world, network):
    """After `finish` each master's gradient is the sum over all ranks of its elements; None if unused."""
    mine, one = Replica(answer.ZeroStage1, network.group), Reference(world.size)
    for step, count in ((0, 2), (1, 2), (2, 1)):  # in the last one no rank uses the parameter `rare`
        mine.run_backward(step, count)
        mine.zero.finish()
        expect_gradients(mine, one.gradients(step, count), f"step {step + 1}")
        expect("the names in `local` after finish", list(mine.zero.local), [], case=f"step {step + 1}")
    mine.zero.clear()
    left = [name for name, master in mine.zero.masters.items() if master.grad is not None]
    expect("the names of the masters with a gradient after clear", left, [])
    if world.rank == world.size - 1:
        mine.zero.add("rare", torch.zeros(2, dtype=torch.float64))
    mine.zero.finish()
    used = [name for name, master in mine.zero.masters.items() if master.grad is not None]
    wanted = [name for name in own_elements(world.size, world.rank, mine.model) if name == "rare"]
    case = "a step in which the last rank adds a gradient of zeros of `rare`, and nothing else is added"
    expect("the names of this rank's masters with a gradient", used, wanted, case=case)
    for name in wanted:
        expect(
            f"the gradient of this rank's master of {name}", mine.zero.masters[name].grad.abs().sum(), 0.0, case=case
        )


@test(points=1, ranks=(1, 2))
def reductions_add_up(answer, world, network):
    """`reduce` takes gradients out of `local` and adds their sum to `grad`, in stage 2 repeatedly; `clear` forgets."""
    mine = Replica(answer.ZeroStage1, network.group)
    zero, names = mine.zero, names_by_block(mine.model)[0]

    def add(value=1.0):
        for name in names:
            zero.add(name, torch.full_like(dict(mine.model.named_parameters())[name], value))

    def expect_reduced(total, when):
        missing = [name for name in names if name not in zero.local]
        expect(f"the names of block 0 that `local` lacks after add, {when}", missing, [])
        zero.reduce(zero.blocks[0])
        left = [name for name in names if name in zero.local]
        expect(f"the names of block 0 that `local` has after reduce, {when}", left, [])
        got = float(zero.blocks[0].grad[0])
        expect(f"the first element of block 0's grad after reduce, {when}", got, float(total))

    zero.clear()
    for number in (1, 2):
        add()
        expect_reduced(number * world.size, f"micro-batch {number}")
        added = [zero.num_added[name] for name in names]
        expect("num_added of each parameter of block 0", added, [number] * len(names), case=f"micro-batch {number}")
    for value in (math.inf, math.nan):
        add(value)
        zero.reduce(zero.blocks[0])
    add()
    zero.clear()  # the step is aborted
    expect("the sum of num_added after clear", sum(zero.num_added.values()), 0)
    add()
    expect_reduced(world.size, "in the step after an aborted one")


@test(points=2, ranks=(1, 2))
def flat_parameters_of_blocks_and_root(answer, world, network):
    """One flat parameter per block, in the order of forward, and the root; None where every parameter is in a block."""
    mine = Replica(answer.ZeroStage1, network.group)
    *blocks, root = names_by_block(mine.model)
    expect("the names in each of `blocks`", [list(flat.parameters) for flat in mine.zero.blocks], blocks)
    expect("the names in `root`", list(mine.zero.root.parameters), root)
    names = [list(flat.parameters) for flat in mine.zero.flat_params]
    expect("the names in each of `flat_params`", sorted(names), sorted([*blocks, root]))
    layers, parameters = blocks_of(mine.model), dict(mine.model.named_parameters())
    inside = {name: parameters[name] for names in blocks for name in names}
    middle = answer.ZeroStage1(inside, inside, layers, network.group)
    expect("the root of a stage whose parameters are all in blocks", middle.root, None)
    expect("the number of flat parameters there", len(middle.flat_params), len(blocks))


@test(points=2, ranks=(2, 3))
def each_element_has_one_owner(answer, world, network):
    """Optimizer states of all ranks together are two per used element, and each rank has its shards' only."""
    mine = Replica(answer.ZeroStage1, network.group)
    mine.train(0)
    moments = sum(t.numel() for state in mine.optimizer.state.values() for t in state.values() if t.dim())
    own, unused = own_elements(world.size, world.rank, mine.model), "never"
    wanted = 2 * sum(len(elements) for name, elements in own.items() if name != unused)
    expect("the elements of Adam's moments on this rank", moments, wanted, case="after one step")
    total = sum(all_gather_object(moments, network.group))
    used = sum(p.numel() for name, p in mine.model.named_parameters() if name != unused)
    expect("the elements of Adam's moments on all ranks", total, 2 * used, case="after one step")


@test(points=3, ranks=(2, 3, 4))
def bytes_of_one_all_reduce(answer, world, network):
    """A step sends one reduce-scatter and one all-gather of each flat parameter, whatever the micro-batches."""
    mine = Replica(answer.ZeroStage1, network.group)
    numel = sum(padded_elements(world.size, mine.model))
    for step, count in enumerate((1, 2, 4)):
        before, case = len(network.records), f"{count} micro-batch{'es' * (count > 1)}"
        with expect_sent(mine, network, 2 * numel, case):
            mine.train(step, count)
            launched = Counter(record.name for record in network.records[before:])
        for name in ("reduce_scatter", "all_gather"):
            expect(f"the number of {name} operations in a step", launched[name], LAYERS + 1, case=case)


@test(points=2, ranks=(1, 2, 3))
def masters_keep_what_rounding_loses(answer, world, network):
    """Sums and updates are in the masters' dtype; the parameters of all ranks are the rounded masters."""
    small, size = 2.0**-12, -(-5 // world.size)  # small is lost beside 1 in bfloat16
    start = 1 + torch.arange(5, dtype=torch.float64) * small
    for dtype in (torch.bfloat16, torch.float64):
        parameters = {"w": nn.Parameter(start.to(dtype))}
        masters = parameters if dtype == torch.float64 else {"w": start.clone()}
        zero = answer.ZeroStage1(parameters, masters, {}, network.group)
        optimizer = torch.optim.SGD(list(zero.masters.values()), lr=1.0)
        for step in range(2):
            zero.clear()
            for number in (small / 2, 1.0):
                gradient = torch.full((5,), number, dtype=dtype)
                zero.add("w", gradient)
                zero.add("w", gradient)
                expect("a given gradient after add", gradient, torch.full((5,), number, dtype=dtype))
            zero.end_micro_batch()
            zero.finish()
            optimizer.step()
            zero.update_parameters()
            wanted = start - 2 * (step + 1) * world.size * (1 + small / 2)
            case = f"step {step + 1}: parameters in {str(dtype).removeprefix('torch.')}, masters in float64"
            expect("this rank's masters", zero.masters["w"].detach(), wanted.split(size)[world.rank], case=case)
            expect("the parameters", parameters["w"].detach(), wanted.to(dtype), case=case)


@test(points=2, ranks=(1, 2))
def sharded_parameters_are_freed(answer, world, network):
    """With shards_parameters, update_parameters frees every buffer and gathers none; the shards have the update."""

    class Sharded(answer.ZeroStage1):
        shards_parameters = True

    for dtype in (torch.float64, torch.bfloat16):
        parameters = {"w": nn.Parameter(torch.arange(6, dtype=dtype))}
        masters = parameters if dtype == torch.float64 else {"w": torch.arange(6, dtype=torch.float64)}
        zero = Sharded(parameters, masters, {}, network.group)
        zero.clear()
        zero.add("w", torch.ones(6, dtype=dtype))
        zero.finish()
        torch.optim.SGD(list(zero.masters.values()), lr=1.0).step()
        before, case = len(network.records), f"parameters in {str(dtype).removeprefix('torch.')}, masters in float64"
        zero.update_parameters()
        expect("collectives of update_parameters", len(network.records) - before, 0, case=case)
        expect("bytes of the buffer after update_parameters", zero.root.full.untyped_storage().nbytes(), 0, case=case)
        zero.root.start_gather()
        zero.root.wait()
        wanted = [i - world.size for i in range(6)]
        expect("the parameter once it is gathered", parameters["w"].detach().tolist(), wanted, case=case)


@test(points=2, ranks=(2,))
def memory_of_the_shards(answer, world, network):
    """Parameters once, gradients and moments of half the elements; local gradients only until they are reduced."""
    with LiveTensorMemory() as memory:
        mine = Replica(answer.ZeroStage1, network.group, WIDTH)
        model = sum(parameter.numel() for parameter in mine.model.parameters()) * 8
        sharded = model + model // 2
        expect_about("after the model is flat", memory.nbytes(), sharded)
        for step in range(2):
            mine.run_backward(step)
            states = model * step  # two moments of half the elements
            expect_about(f"after the backward of step {step + 1}", memory.nbytes(), sharded + states + model)
            mine.zero.finish()
            expect_about(f"after finish of step {step + 1}", memory.nbytes(), sharded + states)
            mine.optimizer.step()
            mine.zero.update_parameters()
            expect_about(f"after step {step + 1}", memory.nbytes(), sharded + model)


DECLARATION = declare_step(
    lambda answer, group, width: Replica(answer.ZeroStage1, group, width),
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """A step on 1 to 7 ranks and in a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
