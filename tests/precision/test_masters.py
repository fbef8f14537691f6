"""Master weights and gradient accumulation in float32 keep what 16 bits would lose; checkpoints keep the loss scale."""

import pytest
import torch

from minidist.comm import World
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters
from tests.helpers.small_run import (
    read_curve,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    with_resume,
    write_text,
)
from tests.helpers.zero_engines import build_engine, local_micro_batches, make_config

STAGES = (0, 1, 2, 3)


def masters_around_a_step(world, configs) -> list[dict]:
    """The masters of each engine, before a step and after it: (start, stop) in the flat parameter, and the elements;
    and the parameters after it, all gathered."""
    results = []
    for config in configs:
        engine = build_engine(world, config)
        bounds = {
            name: at
            for m in engine.reducer.members
            for name, at in m.flat_param.layout.param_ranges(m.flat_param.group.rank).items()
        }

        def masters(engine=engine, bounds=bounds) -> dict:
            return {
                name: (*bounds[name], tensor.clone()) for name, tensor in engine.reducer.checkpoint_tensors().items()
            }

        before = masters()
        engine.step(0, local_micro_batches(world, config), 0.1)
        after = masters()
        if engine.reducer.gatherer is not None:
            engine.reducer.gatherer.gather_all()
        parameters = {name: p.detach().flatten().clone() for name, p in engine.parameters.items()}
        results.append({"before": before, "after": after, "parameters": parameters})
        engine.groups.destroy()
    return results


def bf16_configs() -> list:
    return [make_config(2, stage, "bf16") for stage in STAGES]


def test_masters_start_at_unrounded_initial_values(ranks):
    configs = bf16_configs()
    model = Transformer(configs[0].model)
    init_parameters(model, 0)
    exact = {name: p.detach().flatten() for name, p in named_parameters(model).items()}
    assert not torch.equal(exact["model.embed_tokens.weight"], exact["model.embed_tokens.weight"].bfloat16().float())
    for rank in ranks(masters_around_a_step, 2, configs):
        for seen in rank:
            assert all(torch.equal(tensor, exact[name][a:b]) for name, (a, b, tensor) in seen["before"].items())
            assert all(tensor.dtype == torch.float32 for *_, tensor in seen["before"].values())


def test_parameters_are_the_rounded_masters_after_a_step(ranks):
    by_rank = ranks(masters_around_a_step, 2, bf16_configs())
    for stage in STAGES:
        moved = 0
        for seen in (by_rank[0][stage], by_rank[1][stage]):
            for name, (a, b, master) in seen["after"].items():
                moved += not torch.equal(master, seen["before"][name][2])
                for other in by_rank:  # what this rank keeps, all of them compute with
                    assert torch.equal(other[stage]["parameters"][name][a:b], master.bfloat16()), (stage, name)
        assert moved


def accumulate_gradients(world, configs) -> list[list[float]]:
    """The gradient of one parameter after a contribution of 1 and 256 of 2**-9, all in bfloat16."""
    found, name = [], "model.norm.weight"
    for config in configs:
        engine = build_engine(world, config)
        for micro_batch in range(4):
            for at in range(64 + (micro_batch == 0)):
                engine.reducer.accumulate(
                    name, torch.full((6,), 1.0 if micro_batch == at == 0 else 2**-9, dtype=torch.bfloat16)
                )
            engine.reducer.finish_micro_batch()
        engine.finish_reductions_and_unscale()
        found.append(engine.reducer.gradients().get(name, torch.zeros(0)).tolist())
        engine.groups.destroy()
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_are_accumulated_in_float32(ranks, world):
    """bfloat16 has no number between 1 and 1 + 2**-7: the 256 contributions, one after the other, would be lost."""
    by_rank = ranks(accumulate_gradients, world, [make_config(world, stage, "bf16", 4) for stage in STAGES])
    for stage in STAGES:
        elements = [rank[stage] for rank in by_rank]
        expected = [1.5 * world] * 6
        assert (elements == [expected] * world) if stage == 0 else (sum(elements, []) == expected)


def test_a_resumed_run_keeps_its_loss_scale(tmp_path):
    """Every step without overflow doubles the scale, so a scale that restarts differs in the first resumed step."""
    scale = {"precision__policy": "fp16", "precision__initial_scale": 64.0, "precision__growth_interval": 1}
    config = small_config(tmp_path / "whole", write_text(tmp_path), checkpoint__every=0, **scale)
    train_small(World.single(), config, stop_after=5)
    broken = with_changes(config, folder=tmp_path / "broken")
    train_small(World.single(), broken, stop_after=2)
    train_small(World.single(), with_resume(broken, tmp_path / "broken"), stop_after=3)
    whole, resumed = [
        [row["loss_scale"] for row in read_metrics(tmp_path / name) if "loss_scale" in row]
        for name in ("whole", "broken")
    ]
    assert whole == resumed and whole[0] < whole[-1]
    assert read_curve(tmp_path / "whole") == read_curve(tmp_path / "broken")


def mean_updates(world, configs) -> list[tuple[float, float]]:
    """The mean change after a hundred updates of -1e-4, of weights of 1 and of all weights."""
    results = []
    for config in configs:
        engine = build_engine(world, config)
        start = {name: tensor.double().clone() for name, tensor in engine.reducer.checkpoint_tensors().items()}
        for member in engine.reducer.members:
            member.gradients.result.fill_(1.0)
        for step in range(100):
            engine.clip_and_update(1e-4, 1.0, step)
        by = {name: tensor.double() - start[name] for name, tensor in engine.reducer.checkpoint_tensors().items()}
        every = torch.cat([tensor.flatten() for tensor in by.values()])
        results.append((by["model.norm.weight"].mean().item(), every.mean().item()))
        engine.groups.destroy()
    return results


def test_masters_keep_updates_too_small_for_bfloat16(ranks):
    """Below 1 a bfloat16 has neighbours 4e-3 away: rounded to the nearest, none of the updates would be seen.

    Rounded at random each counts on the average. Of 1,330 weights few are as large as 1; a rounding is off by at most
    4e-3, so the mean of 100 x 1,330 of them strays by less than 100 x 4e-3 / sqrt(133,000) = 1.1e-3.
    """
    optim = {"kind": "sgd", "weight_decay": 0.0, "clip_norm": None}
    kept = make_config(1, 1, "bf16", optim=optim)
    rounded = make_config(1, 1, "bf16", optim=optim, precision={"master": "stochastic"})
    ((masters, random),) = ranks(mean_updates, 1, [kept, rounded])
    assert masters == pytest.approx((-0.01, -0.01), abs=100 * 2**-24)  # 100 roundings below 1
    assert random[1] == pytest.approx(-0.01, abs=1.1e-3)
