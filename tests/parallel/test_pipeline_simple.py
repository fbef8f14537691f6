"""`--engine mixed` under a pipeline: losses and gradients of one process, and of the fast engine, in float64."""

import pytest
import torch

from minidist.comm import World, bind
from minidist.config import Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.train.engine import Engine
from tests.helpers.small_run import with_changes

# The embedding is the output head too, and is on two stages.
CONFIG = with_changes(
    Config(model=ModelConfig(256, 32, 48, 5, 4, 2, 16)),
    data__seq_len=16,
    train__global_batch=11,
    train__micro_batches=5,
)


def train(world: World, config: Config) -> tuple:
    """Two steps of 11 samples of unequal lengths, in micro-batches of 2 and 3: losses, gradients, executor's peak."""
    groups = bind(world, mesh := config.mesh_of(world.size), group_specs(mesh, config))
    model = Transformer(config.model).double()
    init_parameters(model, 3 + world.rank)  # rank 0's values are broadcast
    engine = Engine(parallelize(model, groups, config), groups, config.optim, 0)
    losses, grads = [], {}
    loader = Loader(generate_text(2000), 16, 1, min_length=3)
    for step in range(2):

        def keep(step=step):
            found = engine.reducer.gradients().items()
            grads.update({(step, name): grad.clone() for name, grad in found if grad is not None})

        batches = loader.micro_batches(11 * step, 11, 0, 1, 5)
        losses.append(engine.step(step, batches, 0.1, on_gradients_reduced=keep).loss)
    pipeline = engine.forward_backward.pipeline
    return losses, grads, pipeline and (type(pipeline).__name__, pipeline.peak_live)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_simple_equals_one_process_and_the_fast_engine(ranks, kind, stages):
    ((losses, grads, _),) = ranks(train, 1, CONFIG)
    config = with_changes(CONFIG, mesh__pp=stages, parallel__schedule=kind)
    by_engine = {engine: ranks(train, stages, with_changes(config, engine=engine)) for engine in ("fast", "mixed")}
    for stage, (fast, simple) in enumerate(zip(*by_engine.values(), strict=True)):
        peak = 5 if kind == "gpipe" else stages - stage
        assert simple[2] == ("SimplePipelineExecutor", peak) and fast[2] == ("PipelineExecutor", peak)
        assert simple[0] == pytest.approx(losses, rel=1e-13) and simple[0] == pytest.approx(fast[0], rel=1e-15)
        assert simple[1].keys() == fast[1].keys()
        for key, grad in simple[1].items():
            # Sums in another order, in float64.
            torch.testing.assert_close(grad, grads[key], rtol=0, atol=1e-13)
            torch.testing.assert_close(grad, fast[1][key], rtol=0, atol=1e-15)
    assert grads.keys() == set().union(*(found for _, found, _ in by_engine["mixed"]))
