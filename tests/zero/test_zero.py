"""ZeRO to the byte: each rank's memory and traffic, and when layers are gathered and freed. Parity tests the values."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from minidist.tools.console.sample_text import sample_text
from tests.helpers.exhaustive import exhaustive
from tests.helpers.zero_engines import build_engine, local_micro_batches, make_config

EMBEDDING, NORM = 129 * 6, 6
LAYER = 6 + 4 * 36 + 6 + 3 * 42
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


# -- memory of model states --------------------------------------------------------------------------------------------


def flat_param_sizes(stage: int, world: int) -> list[int]:
    """Elements of each flat parameter, padding included, counted by hand.

    Stages 0 and 1: one for all parameters, which fit into a bucket. Stage 2: none larger than a layer, filled from the
    last parameter to the first, so that the final norm joins the last layer and a layer's first norm the layer before.
    Stage 3: one for each layer and one for the rest.
    """
    rows = {2: [LAYER, LAYER, NORM, EMBEDDING], 3: [EMBEDDING + NORM, LAYER, LAYER]}
    rows = rows.get(stage, [EMBEDDING + NORM + 2 * LAYER])
    return [-(-numel // world) * world for numel in rows]


def storage_bytes(tensors) -> int:
    """Bytes of the tensors' storages, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def measure_model_states(world, configs) -> list[dict]:
    """Bytes of parameters, gradients, masters and optimizer states after one step.

    Gradients are measured twice: before the update ("gradients") and after the step ("gradients after").
    """
    results = []
    for config in configs:
        engine = build_engine(world, config)
        members, summed = engine.reducer.members, []

        def gradients(members=members) -> int:
            return storage_bytes(m.gradients.result for m in members)

        def look(summed=summed, gradients=gradients) -> None:
            summed.append(gradients())

        engine.step(0, local_micro_batches(world, config), 0.1, on_gradients_reduced=look)
        flat_params = [member.flat_param for member in members]
        parameters = [*(p for p in engine.parameters.values()), *(flat_param.shard for flat_param in flat_params)]
        masters = [flat_param.masters.tensor for flat_param in flat_params if flat_param.masters.separate]
        states = [t for state in engine.optimizer.state.values() for t in state.values() if t is not None]
        results.append(
            {
                "parameters": storage_bytes(parameters),
                "gradients": summed[0],
                "gradients after": gradients(),
                "masters": storage_bytes(masters),
                "moments": sum(t.numel() * t.element_size() for t in states if t.dim()),
                "moment_elements": sum(t.numel() for t in states if t.dim()),
                "steps": sum(4 for t in states if not t.dim()),
                "tensors": len(engine.reducer.masters),
            }
        )
        engine.groups.destroy()
    return results


POLICIES = {
    "fp32": ("fp32", {}, (4, 4, 0, 4)),
    "fp64": ("fp64", {}, (8, 8, 0, 8)),
    "bf16": ("bf16", {}, (2, 4, 4, 4)),
    "fp16": ("fp16", {}, (2, 4, 4, 4)),
    "fp16, sums too": ("fp16", {"grad_accum": "fp16"}, (2, 2, 4, 4)),
    "bf16, rounded": ("bf16", {"master": "stochastic"}, (2, 4, 0, 4)),
}


@pytest.mark.parametrize("world", [1, 2, 3, *exhaustive(4, 8)])
def test_model_states_match_the_formula_to_the_byte(ranks, world):
    """Bytes per element of each policy: parameter, accumulated gradient, separate master, state (arXiv 1910.02054)."""
    # Stage 0 in a single dtype has no flat parameters: tests/tools/test_estimate_traffic.py covers it.
    cases = [(name, stage) for name in POLICIES for stage in range(4) if stage or name not in ("fp32", "fp64")]
    configs = [make_config(world, s, POLICIES[name][0], precision=POLICIES[name][1]) for name, s in cases]
    by_rank = ranks(measure_model_states, world, configs)
    for number, (name, stage) in enumerate(cases):
        p, a, m, s = POLICIES[name][2]
        n = sum(flat_param_sizes(stage, world))
        share = n // world
        held = [by_rank[rank][number] for rank in range(world)]
        for seen in held:
            assert seen["parameters"] == (share if stage == 3 else n) * p, (name, stage)
            assert seen["gradients"] == (n if stage < 2 else share) * a, (name, stage)
            assert seen["gradients after"] == (n * a if stage < 2 else 0), (name, stage)
            assert seen["masters"] == (n if stage == 0 else share) * m, (name, stage)
            assert seen["steps"] == 4 * seen["tensors"]
            assert seen["moments"] == seen["moment_elements"] * s
        # Moments have no padding: a rank has those of the elements in its shard.
        total = EMBEDDING + NORM + 2 * LAYER
        assert sum(seen["moment_elements"] for seen in held) == 2 * total * (world if stage == 0 else 1)
        assert all(seen["moment_elements"] <= 2 * (n if stage == 0 else share) for seen in held)


# -- traffic -----------------------------------------------------------------------------------------------------------


def measure_traffic(world, configs) -> list[tuple[dict, dict]]:
    """Bytes, and number of operations, of one step in the gradients' group, by name of the operation."""
    results = []
    for config in configs:
        engine = build_engine(world, config)
        engine.groups.meter.records.clear()
        engine.step(0, local_micro_batches(world, config), 0.1)
        totals, counts = {}, {}
        for record in engine.groups.meter.records:
            if record.group_name == "grads":
                totals[record.name] = totals.get(record.name, 0) + record.wire_bytes
                counts[record.name] = counts.get(record.name, 0) + 1
        results.append((totals, counts))
        engine.groups.destroy()
    return results


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, sums too"])
def test_wire_bytes_match_the_formula(ranks, world, policy):
    """f = (N - 1) / N of the padded elements, once for each reduce-scatter (b_g) and each all-gather (b_p)."""
    name, more, (b_p, b_a, _, _) = POLICIES[policy]
    ways = {
        "1": (1, {}), "2": (2, {}), "2 whole": (2, {"keep_gradients": True}),
        "3": (3, {}), "3 freed": (3, {"keep_last_block": False}), "3 alone": (3, {"prefetch": False}),
    }  # fmt: skip
    cases = list(itertools.product(ways, (1, 4)))
    configs = [make_config(world, ways[way][0], name, k, precision=more, **ways[way][1]) for way, k in cases]
    for seen in ranks(measure_traffic, world, configs):
        for (way, k), (totals, _) in zip(cases, seen, strict=True):
            stage = ways[way][0]
            rows = flat_param_sizes(1 if way == "2 whole" else stage, world)
            once = sum(numel // world * (world - 1) for numel in rows)
            kept = 0 if way == "3 freed" else sum(numel // world * (world - 1) for numel in rows[:2])
            reductions = k if way in ("2", "3", "3 freed", "3 alone") else 1
            gathered = 2 * k * once - k * kept if stage == 3 else once
            assert totals == {"reduce_scatter": reductions * once * b_a, "all_gather": gathered * b_p}, (way, k)


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
def test_stage_0_all_reduces_gradients_only(ranks, world):
    """2 f n b_g per rank on average, with separate masters and without; without, one more element for each parameter
    says whether a rank used it."""
    configs = [make_config(world, 0, policy, k) for policy in ("fp32", "bf16") for k in (1, 4)]
    by_rank = ranks(measure_traffic, world, configs)
    for number, config in enumerate(configs):
        n = EMBEDDING + NORM + 2 * LAYER + (2 + 2 * 9 if config.precision.policy == "fp32" else 0)
        total = sum(seen[number][0]["all_reduce"] for seen in by_rank)
        assert total == 2 * (world - 1) * n * 4
        assert all(set(seen[number][0]) == {"all_reduce"} for seen in by_rank)


# -- lifetime of gathered parameters -----------------------------------------------------------------------------------


def unsharded_while_running(world, config) -> tuple[list, list]:
    """In the forward and the backward of each layer: which flat parameters are gathered or in flight."""
    engine = build_engine(world, config)
    blocks, forward, backward = engine.reducer.gatherer, [], []

    def there() -> set:
        found = {index for index, block in blocks.blocks.items() if block.flat_params[0].is_unsharded}
        return found | ({"rest"} if blocks.root.flat_params[0].is_unsharded else set())

    for index, layer in enumerate(engine.model.model.layers):  # these hooks come after the engine's own
        layer.register_forward_pre_hook(lambda *_, index=index: forward.append((index, there())))

        def after(module, args, out, index=index):
            out.register_hook(lambda _: backward.append((index, there())))

        layer.register_forward_hook(after)
    engine.step(0, local_micro_batches(world, config), 0.1)
    return forward, backward, there()


def test_stage_3_gathers_a_layer_before_use_and_frees_it_after(ranks):
    for kept, prefetch in itertools.product((True, False), repeat=2):
        config = make_config(2, 3, keep_last_block=kept, prefetch=prefetch)
        for forward, backward, after in ranks(unsharded_while_running, 2, config):
            ahead = {1} if prefetch else set()
            assert forward == [(0, {"rest", 0} | ahead), (1, {"rest", 1})]
            assert backward == [(1, {"rest", 1} | ({0} if prefetch else set())), (0, {"rest", 0})]
            assert after == set()


def test_an_aborted_step_leaves_no_state(ranks):
    for stage in (1, 2, 3):
        assert all(ranks(abort_a_step, 2, make_config(2, stage, micro_batches=2)))


def abort_a_step(world, config) -> bool:
    """Whether a step, an aborted step and a step give the state of the two steps alone."""
    whole, broken = build_engine(world, config), build_engine(world, config)
    for step in range(3):
        if step == 1:
            count = iter(range(10))

            def stop(*_, count=count):
                if next(count) == 1:
                    raise InterruptedError

            hook = broken.model.model.layers[0].register_forward_hook(stop)
            with pytest.raises(InterruptedError):
                broken.step(step, local_micro_batches(world, config, step), 0.1)
            hook.remove()
            broken.reducer.finish_micro_batch()
            broken.reducer.clear_gradients()
        else:
            for engine in (whole, broken):
                engine.step(step, local_micro_batches(world, config, step), 0.1)
    mine, other = whole.reducer.checkpoint_tensors(), broken.reducer.checkpoint_tensors()
    return all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_gradient_after_ready_is_refused(ranks):
    assert all("came after mark_ready" in said for said in ranks(add_after_ready, 2, make_config(2, 1)))


def add_after_ready(world, config) -> str:
    reducer = build_engine(world, config).reducer
    name = "model.norm.weight"
    reducer.accumulate(name, torch.ones(6))
    reducer.mark_ready(name)
    with pytest.raises(RuntimeError) as error:
        reducer.accumulate(name, torch.ones(6))
    return str(error.value)


def test_sampled_text_is_the_same_in_every_stage(ranks):
    """In stage 3 no rank has the full model: all ranks take part in gathering every layer."""
    configs = [make_config(2, stage) for stage in (0, 1, 2, 3)]
    of_rank_0, others = ranks(sample_in_each_stage, 2, configs)
    assert len(set(of_rank_0)) == 1 and of_rank_0[0]
    assert others == [None, None, None, of_rank_0[0]]


def sample_in_each_stage(world, configs) -> list[tuple[str, str] | None]:
    """What `sample_text` gives on this rank after one step."""
    results = []
    for config in configs:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample_tokens=8))
        engine = build_engine(world, config)
        engine.step(0, local_micro_batches(world, config), 0.1)
        results.append(sample_text(engine, config, np.arange(65, 70)))
        engine.groups.destroy()
    return results
