"""Tests of zero_stage_one: the training of a small model on all ranks against one process in float64."""

import torch

from exercises.observations import LiveTensorMemory
from exercises.testing import Wrong, expect, expect_raises, test
from exercises.zero_run import (
    TOLERANCE,
    WIDTH,
    Net,
    Reference,
    Replica,
    expect_about,
    expect_equals_one_process,
    expect_sent,
    names_by_block,
    own_elements,
    padded_elements,
)
from minidist.comm import all_gather_object


@test(points=6, ranks=(1, 2, 3, 4))
def equals_one_process(answer, world, network):
    """After each step all ranks have the parameters of AdamW on the whole model; ranks start from other values."""
    expect_equals_one_process(answer.ZeroStage1, network.group, world.size)


@test(points=3, ranks=(1, 2, 3, 4))
def gradients_are_sums_of_own_elements(answer, world, network):
    """After finish_reductions each master's gradient is the sum over all ranks of its elements; None if unused."""
    mine, one = Replica(answer.ZeroStage1, network.group), Reference(world.size)
    own = own_elements(world.size, world.rank, mine.model)
    expect("the names of this rank's masters", sorted(mine.zero.masters), sorted(own))
    expect("the names of the masters' specs", sorted(mine.zero.master_specs), sorted(own))
    blocks = [list(flat.parameters) for flat in mine.zero.flat_params]
    expect("the names in flat_params, of the last block first", blocks, names_by_block(mine.model))
    for step, count in ((0, 2), (1, 2), (2, 1)):  # in the last one no rank uses the parameter `rare`
        mine.run_backward(step, count)
        mine.zero.finish_reductions()
        wanted, got = one.gradients(step, count), mine.zero.gradients()
        for name, elements in own.items():
            case = f"step {step + 1}, elements {elements[0]} to {elements[-1]} of {name}"
            if wanted[name] is None:
                expect("the gradient of a parameter that no rank used", got[name], None, case=case)
                continue
            expected = wanted[name].flatten()[elements]
            if not isinstance(got[name], torch.Tensor):
                raise Wrong("wrong", "the gradient", str(expected.tolist())[:90], str(got[name]), case=case)
            expect("the gradient", got[name], expected, case=case, tolerance=TOLERANCE)
            expect("the gradient of the master", mine.zero.masters[name].grad, expected, case=case, tolerance=TOLERANCE)
        mine.zero.clear_gradients()
        left = [name for name, gradient in mine.zero.gradients().items() if gradient is not None]
        expect("the names with a gradient after clear_gradients", left, [])


@test(points=3, ranks=(1, 2, 3, 4))
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
        with expect_sent(mine, network, [2 * numel] * 2, f"{count} micro-batch{'es' * (count > 1)}"):
            mine.train(step, count)


@test(points=2, ranks=(2,))
def memory_of_the_shards(answer, world, network):
    """Parameters once; moments and reduced gradients of half the elements; local gradients until they are reduced."""
    with LiveTensorMemory() as memory:
        mine = Replica(answer.ZeroStage1, network.group, WIDTH)
        full = memory.nbytes()
        model = sum(parameter.numel() for parameter in mine.model.parameters()) * 8
        expect_about("after the model is flat", full, model)
        for step in range(2):
            mine.run_backward(step)
            states = model * step  # two moments of half the elements
            mine.zero.finish_reductions()
            expect_about(f"after finish_reductions of step {step + 1}", memory.nbytes(), model + states + model // 2)
            mine.zero.step(mine.optimizer)
            expect_about(f"after step {step + 1}", memory.nbytes(), 2 * model)


@test(points=1, ranks=(2,))
def late_gradients_are_refused(answer, world, network):
    """A gradient after mark_ready of its parameter raises RuntimeError, until the gradients are cleared."""
    mine = Replica(answer.ZeroStage1, network.group)
    gradient = torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        mine.zero.accumulate("head.bias", gradient.clone())
        mine.zero.mark_ready("head.bias")
        expect_raises(RuntimeError, mine.zero.accumulate, "head.bias", gradient.clone())
        mine.zero.accumulate("first.bias", torch.ones(3, dtype=torch.float64))
        mine.zero.clear_gradients()
    expect("the number of layers", len(mine.zero.flat_params), len(Net(0).layers) + 1)
