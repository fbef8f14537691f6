"""ZeRO to the byte: what every rank keeps, what it sends, when it is there and when it is gone. Values: `parity`."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from minidist.tools.console.sample_text import sample_text
from tests.helpers.exhaustive import exhaustive
from tests.helpers.zero_engines import batches_of, configured, engine_of

EMBEDDING, NORM = 129 * 6, 6
LAYER = 6 + 4 * 36 + 6 + 3 * 42
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


# -- bytes that stay ---------------------------------------------------------------------------------------------------


def padded(stage: int, world: int) -> list[int]:
    """Elements of each row, by hand.

    One for all, which fit into a bucket. Stage 2: none larger than a layer, from the last parameter to the first: the
    norm takes the place of a layer's own first norm (6 elements too), which comes with the next layer. Stage 3: one for
    each layer and one for the rest.
    """
    rows = {2: [LAYER, LAYER, NORM, EMBEDDING], 3: [EMBEDDING + NORM, LAYER, LAYER]}
    rows = rows.get(stage, [EMBEDDING + NORM + 2 * LAYER])
    return [-(-numel // world) * world for numel in rows]


def storages(tensors) -> int:
    """Bytes of memory behind some tensors, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def model_state(world, configs) -> list[dict]:
    """Bytes of parameters, gradients, masters and the optimizer's states: gradients before the update, when they are
    summed, and when the step is over; the others when it is over."""
    found = []
    for config in configs:
        engine = engine_of(world, config)
        members, summed = engine.reducer.members, []

        def gradients(members=members) -> int:
            return storages(m.gradients.result for m in members)

        def look(summed=summed, gradients=gradients) -> None:
            summed.append(gradients())

        engine.step(0, batches_of(world, config), 0.1, inspect=look)
        flat_params = [member.flat_param for member in members]
        parameters = [*(p for p in engine.parameters.values()), *(flat_param.part for flat_param in flat_params)]
        masters = [flat_param.masters.tensor for flat_param in flat_params if flat_param.masters.separate]
        states = [t for state in engine.optimizer.state.values() for t in state.values() if t is not None]
        found.append(
            {
                "parameters": storages(parameters),
                "gradients": summed[0],
                "gradients after": gradients(),
                "masters": storages(masters),
                "moments": sum(t.numel() * t.element_size() for t in states if t.dim()),
                "moment_elements": sum(t.numel() for t in states if t.dim()),
                "steps": sum(4 for t in states if not t.dim()),
                "tensors": len(engine.reducer.masters),
            }
        )
        engine.groups.destroy()
    return found


POLICIES = {
    "fp32": ("fp32", {}, (4, 4, 0, 4)),
    "fp64": ("fp64", {}, (8, 8, 0, 8)),
    "bf16": ("bf16", {}, (2, 4, 4, 4)),
    "fp16": ("fp16", {}, (2, 4, 4, 4)),
    "fp16, sums too": ("fp16", {"grad_accum": "fp16"}, (2, 2, 4, 4)),
    "bf16, rounded": ("bf16", {"master": "stochastic"}, (2, 4, 0, 4)),
}


@pytest.mark.parametrize("world", [1, 2, 3, *exhaustive(4, 8)])
def test_model_states_are_the_formula_to_the_byte(ranks, world):
    """(b_p, b_a, b_m, b_s) of each policy: parameter, sum of gradients, master of its own, state (arXiv 1910.02054)."""
    # Stage 0 in one format has no rows: tests/tools/test_estimate_traffic.py has it.
    cases = [(name, stage) for name in POLICIES for stage in range(4) if stage or name not in ("fp32", "fp64")]
    configs = [configured(world, s, POLICIES[name][0], precision=POLICIES[name][1]) for name, s in cases]
    by_rank = ranks(model_state, world, configs)
    for number, (name, stage) in enumerate(cases):
        p, a, m, s = POLICIES[name][2]
        n = sum(padded(stage, world))
        share = n // world
        held = [by_rank[rank][number] for rank in range(world)]
        for seen in held:
            assert seen["parameters"] == (share if stage == 3 else n) * p, (name, stage)
            assert seen["gradients"] == (n if stage < 2 else share) * a, (name, stage)
            assert seen["gradients after"] == (n * a if stage < 2 else 0), (name, stage)
            assert seen["masters"] == (n if stage == 0 else share) * m, (name, stage)
            assert seen["steps"] == 4 * seen["tensors"]
            assert seen["moments"] == seen["moment_elements"] * s
        # Moments have no padding; a shard's are those of its parameters' elements.
        total = EMBEDDING + NORM + 2 * LAYER
        assert sum(seen["moment_elements"] for seen in held) == 2 * total * (world if stage == 0 else 1)
        assert all(seen["moment_elements"] <= 2 * (n if stage == 0 else share) for seen in held)


# -- bytes that travel -------------------------------------------------------------------------------------------------


def sent(world, configs) -> list[tuple[dict, dict]]:
    """Bytes of one step by name of the operation, of the gradients' group; and how many operations there were."""
    found = []
    for config in configs:
        engine = engine_of(world, config)
        engine.groups.meter.records.clear()
        engine.step(0, batches_of(world, config), 0.1)
        totals, counts = {}, {}
        for record in engine.groups.meter.records:
            if record.use == "grads":
                totals[record.name] = totals.get(record.name, 0) + record.wire_bytes
                counts[record.name] = counts.get(record.name, 0) + 1
        found.append((totals, counts))
        engine.groups.destroy()
    return found


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, sums too"])
def test_wire_bytes_are_the_formula(ranks, world, policy):
    """f = (N - 1) / N of the padded elements, once for each reduce-scatter (b_g) and each all-gather (b_p)."""
    name, more, (b_p, b_a, _, _) = POLICIES[policy]
    ways = {
        "1": (1, {}), "2": (2, {}), "2 whole": (2, {"keep_gradients": True}),
        "3": (3, {}), "3 freed": (3, {"keep_last_block": False}), "3 alone": (3, {"prefetch": False}),
    }  # fmt: skip
    cases = list(itertools.product(ways, (1, 4)))
    configs = [configured(world, ways[way][0], name, k, precision=more, **ways[way][1]) for way, k in cases]
    for seen in ranks(sent, world, configs):
        for (way, k), (totals, _) in zip(cases, seen, strict=True):
            stage = ways[way][0]
            rows = padded(1 if way == "2 whole" else stage, world)
            once = sum(numel // world * (world - 1) for numel in rows)
            kept = 0 if way == "3 freed" else sum(numel // world * (world - 1) for numel in rows[:2])
            reductions = k if way in ("2", "3", "3 freed", "3 alone") else 1
            gathered = 2 * k * once - k * kept if stage == 3 else once
            assert totals == {"reduce_scatter": reductions * once * b_a, "all_gather": gathered * b_p}, (way, k)


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
def test_stage_0_sends_every_gradient_twice(ranks, world):
    """2 f n b_g on the average of the ranks, with masters of another format and without; one element more for each
    parameter says who used it, where there are no masters."""
    configs = [configured(world, 0, policy, k) for policy in ("fp32", "bf16") for k in (1, 4)]
    by_rank = ranks(sent, world, configs)
    for number, config in enumerate(configs):
        n = EMBEDDING + NORM + 2 * LAYER + (2 + 2 * 9 if config.precision.policy == "fp32" else 0)
        total = sum(seen[number][0]["all_reduce"] for seen in by_rank)
        assert total == 2 * (world - 1) * n * 4
        assert all(set(seen[number][0]) == {"all_reduce"} for seen in by_rank)


# -- what is there when ------------------------------------------------------------------------------------------------


def rows_while_running(world, config) -> tuple[list, list]:
    """In the forward and the backward of each layer: which flat parameters are gathered or in flight."""
    engine = engine_of(world, config)
    blocks, forward, backward = engine.reducer.gatherer, [], []

    def there() -> set:
        found = {index for index, block in blocks.blocks.items() if block.flat_params[0].is_unsharded}
        return found | ({"rest"} if blocks.root.flat_params[0].is_unsharded else set())

    for index, layer in enumerate(engine.model.model.layers):  # these hooks come after the engine's own
        layer.register_forward_pre_hook(lambda *_, index=index: forward.append((index, there())))

        def after(module, args, out, index=index):
            out.register_hook(lambda _: backward.append((index, there())))

        layer.register_forward_hook(after)
    engine.step(0, batches_of(world, config), 0.1)
    return forward, backward, there()


def test_a_layer_is_gathered_before_its_turn_and_gone_after_it(ranks):
    for kept, prefetch in itertools.product((True, False), repeat=2):
        config = configured(2, 3, keep_last_block=kept, prefetch=prefetch)
        for forward, backward, after in ranks(rows_while_running, 2, config):
            ahead = {1} if prefetch else set()
            assert forward == [(0, {"rest", 0} | ahead), (1, {"rest", 1})]
            assert backward == [(1, {"rest", 1} | ({0} if prefetch else set())), (0, {"rest", 0})]
            assert after == set()


def test_a_step_that_was_broken_off_leaves_nothing_of_itself(ranks):
    for stage in (1, 2, 3):
        assert all(ranks(broken_off, 2, configured(2, stage, micro_batches=2)))


def broken_off(world, config) -> bool:
    """A step, one that ends in an exception, and the next: as without the one in the middle."""
    whole, broken = engine_of(world, config), engine_of(world, config)
    for step in range(3):
        if step == 1:
            count = iter(range(10))

            def stop(*_, count=count):
                if next(count) == 1:
                    raise InterruptedError

            hook = broken.model.model.layers[0].register_forward_hook(stop)
            with pytest.raises(InterruptedError):
                broken.step(step, batches_of(world, config, step), 0.1)
            hook.remove()
            broken.reducer.end_backward()
            broken.reducer.clear()
        else:
            for engine in (whole, broken):
                engine.step(step, batches_of(world, config, step), 0.1)
    mine, other = whole.reducer.checkpoint_tensors(), broken.reducer.checkpoint_tensors()
    return all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_gradient_after_ready_is_refused(ranks):
    assert all("came after ready" in said for said in ranks(late_gradient, 2, configured(2, 1)))


def late_gradient(world, config) -> str:
    reducer = engine_of(world, config).reducer
    name = "model.norm.weight"
    reducer.add(name, torch.ones(6))
    reducer.ready(name)
    with pytest.raises(RuntimeError) as error:
        reducer.add(name, torch.ones(6))
    return str(error.value)


def test_the_text_at_the_end_is_the_same_in_every_stage(ranks):
    """In stage 3 no rank has the model for itself, and each asks the others for every layer."""
    configs = [configured(2, stage) for stage in (0, 1, 2, 3)]
    of_rank_0, others = ranks(texts, 2, configs)
    assert len(set(of_rank_0)) == 1 and of_rank_0[0]
    assert others == [None, None, None, of_rank_0[0]]


def texts(world, configs) -> list[tuple[str, str] | None]:
    """What `sample_text` gives on this rank after one step."""
    found = []
    for config in configs:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample_tokens=8))
        engine = engine_of(world, config)
        engine.step(0, batches_of(world, config), 0.1)
        found.append(sample_text(engine, config, np.arange(65, 70)))
        engine.groups.destroy()
    return found
