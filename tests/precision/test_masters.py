"""What 16 bits would lose is kept in 32: in masters, in sums of gradients, and in a checkpoint the loss scale."""

import pytest
import torch

from minidist.comm import World
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters
from tests.helpers.small_run import changed, curve_of, resuming, rows_of, run, small_config, write_text
from tests.helpers.zero_engines import batches_of, configured, engine_of

STAGES = (0, 1, 2, 3)


def every_master(world, configs) -> list[dict]:
    """The masters of each engine, before a step and after it: (start, stop) in the flat parameter, and the elements;
    and the parameters after it, all gathered."""
    found = []
    for config in configs:
        engine = engine_of(world, config)
        bounds = {
            name: at
            for m in engine.reducer.members
            for name, at in m.flat_param.layout.held(m.flat_param.group.rank).items()
        }

        def masters(engine=engine, bounds=bounds) -> dict:
            return {
                name: (*bounds[name], tensor.clone()) for name, tensor in engine.reducer.checkpoint_tensors().items()
            }

        before = masters()
        engine.step(0, batches_of(world, config), 0.1)
        after = masters()
        if engine.reducer.gatherer is not None:
            engine.reducer.gatherer.gather_all()
        parameters = {name: p.detach().flatten().clone() for name, p in engine.parameters.items()}
        found.append({"before": before, "after": after, "parameters": parameters})
        engine.groups.destroy()
    return found


def halves() -> list:
    return [configured(2, stage, "bf16") for stage in STAGES]


def test_masters_begin_as_what_was_never_rounded(ranks):
    configs = halves()
    model = Transformer(configs[0].model)
    init_parameters(model, 0)
    exact = {name: p.detach().flatten() for name, p in named_parameters(model).items()}
    assert not torch.equal(exact["model.embed_tokens.weight"], exact["model.embed_tokens.weight"].bfloat16().float())
    for rank in ranks(every_master, 2, configs):
        for seen in rank:
            assert all(torch.equal(tensor, exact[name][a:b]) for name, (a, b, tensor) in seen["before"].items())
            assert all(tensor.dtype == torch.float32 for *_, tensor in seen["before"].values())


def test_after_a_step_every_rank_computes_with_its_masters_rounded(ranks):
    by_rank = ranks(every_master, 2, halves())
    for stage in STAGES:
        moved = 0
        for seen in (by_rank[0][stage], by_rank[1][stage]):
            for name, (a, b, master) in seen["after"].items():
                moved += not torch.equal(master, seen["before"][name][2])
                for other in by_rank:  # what this rank keeps, all of them compute with
                    assert torch.equal(other[stage]["parameters"][name][a:b], master.bfloat16()), (stage, name)
        assert moved


def summed(world, configs) -> list[list[float]]:
    """The gradient of one parameter after a contribution of 1 and 256 of 2**-9, all in bfloat16."""
    found, name = [], "model.norm.weight"
    for config in configs:
        engine = engine_of(world, config)
        for micro_batch in range(4):
            for at in range(64 + (micro_batch == 0)):
                engine.reducer.add(
                    name, torch.full((6,), 1.0 if micro_batch == at == 0 else 2**-9, dtype=torch.bfloat16)
                )
            engine.reducer.end_backward()
        engine.reduce()
        found.append(engine.reducer.gradients().get(name, torch.zeros(0)).tolist())
        engine.groups.destroy()
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_small_gradients_count_beside_large_ones(ranks, world):
    """bfloat16 has no number between 1 and 1 + 2**-7: the 256 contributions, one after the other, would be lost."""
    by_rank = ranks(summed, world, [configured(world, stage, "bf16", 4) for stage in STAGES])
    for stage in STAGES:
        elements = [rank[stage] for rank in by_rank]
        expected = [1.5 * world] * 6
        assert (elements == [expected] * world) if stage == 0 else (sum(elements, []) == expected)


def test_a_resumed_run_goes_on_with_its_loss_scale(tmp_path):
    """Every good step doubles it, so that a scale that is begun again is another in the first step."""
    scale = {"precision__policy": "fp16", "precision__initial_scale": 64.0, "precision__growth_interval": 1}
    config = small_config(tmp_path / "whole", write_text(tmp_path), checkpoint__every=0, **scale)
    run(World.single(), config, stop_after=5)
    broken = changed(config, folder=tmp_path / "broken")
    run(World.single(), broken, stop_after=2)
    run(World.single(), resuming(broken, tmp_path / "broken"), stop_after=3)
    whole, resumed = [
        [row["loss_scale"] for row in rows_of(tmp_path / name) if "loss_scale" in row] for name in ("whole", "broken")
    ]
    assert whole == resumed and whole[0] < whole[-1]
    assert curve_of(tmp_path / "whole") == curve_of(tmp_path / "broken")


def moved(world, configs) -> list[tuple[float, float]]:
    """By how much a hundred updates of -1e-4 have moved weights of 1, and all weights, on the average."""
    found = []
    for config in configs:
        engine = engine_of(world, config)
        start = {name: tensor.double().clone() for name, tensor in engine.reducer.checkpoint_tensors().items()}
        for member in engine.reducer.members:
            member.gradients.result.fill_(1.0)
        for step in range(100):
            engine.update(1e-4, 1.0, step)
        by = {name: tensor.double() - start[name] for name, tensor in engine.reducer.checkpoint_tensors().items()}
        every = torch.cat([tensor.flatten() for tensor in by.values()])
        found.append((by["model.norm.weight"].mean().item(), every.mean().item()))
        engine.groups.destroy()
    return found


def test_masters_keep_what_a_16_bit_weight_would_lose(ranks):
    """Below 1 a bfloat16 has neighbours 4e-3 away: rounded to the nearest, none of the updates would be seen.

    Rounded at random each counts on the average. Of 1,330 weights few are as large as 1; a rounding is off by at most
    4e-3, so the mean of 100 x 1,330 of them strays by less than 100 x 4e-3 / sqrt(133,000) = 1.1e-3.
    """
    optim = {"kind": "sgd", "weight_decay": 0.0, "clip_norm": None}
    kept = configured(1, 1, "bf16", optim=optim)
    rounded = configured(1, 1, "bf16", optim=optim, precision={"master": "stochastic"})
    ((masters, random),) = ranks(moved, 1, [kept, rounded])
    assert masters == pytest.approx((-0.01, -0.01), abs=100 * 2**-24)  # 100 roundings below 1
    assert random[1] == pytest.approx(-0.01, abs=1.1e-3)
