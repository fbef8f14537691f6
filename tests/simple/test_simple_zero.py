"""ZeRO saves memory: each rank has optimizer states of its shard only, and stage 3 no parameters between steps."""

import pytest

from minidist.comm import bind
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from tests.helpers.small_run import small_config, with_changes

MODEL = ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)


def count_after_a_step(world, configs):
    """For each configuration: elements of this rank's Adam moments, bytes of its full parameters, number of flat
    parameters."""
    from minidist.simple.engine import Engine
    from minidist.simple.parallelize import group_specs, parallelize

    found = []
    for config in configs:
        mesh = config.mesh_of(world.size)
        groups = bind(world, mesh, group_specs(mesh, config))
        model = Transformer(config.model)
        init_parameters(model, 0)
        engine = Engine(parallelize(model, groups, config), groups, config)
        engine.step(0, Loader(generate_text(400), 8, 0).micro_batches(0, 4, world.rank, world.size, 1), 1e-3)
        moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().size() for p in engine.model.parameters()}
        found.append((moments, sum(storages.values())))
    return found


@pytest.fixture
def configs(tmp_path):
    config = small_config(tmp_path, tmp_path, mesh__dp=2, optim__kind="adamw", train__micro_batches=1, model=MODEL)
    return [with_changes(config, zero__stage=stage) for stage in (1, 2, 3)]


def test_each_rank_has_its_share_of_the_states(ranks, configs):
    num_parameters = sum(parameter.numel() for parameter in Transformer(MODEL).parameters())
    by_rank = ranks(count_after_a_step, 2, configs)
    for stage, counts in enumerate(zip(*by_rank, strict=True), start=1):
        assert [moments for moments, _ in counts] == [num_parameters // 2] * 2, stage
        assert all((size == 0) == (stage == 3) for _, size in counts), stage
