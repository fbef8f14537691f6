"""What is decided for one rank is decided for all, and where ranks cannot agree nothing is updated (contract 11)."""

import math

import pytest
import torch
import torch.distributed as dist

from minidist.comm import CommError, bind
from minidist.config import Config, OptimConfig
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import DEFAULT_GROUP_SPECS, parallelize
from minidist.train.engine import Engine

BATCH, RANKS = 6, 2


def engine_of(world):
    groups = bind(world, Mesh(dp=world.size), DEFAULT_GROUP_SPECS)
    model = Transformer(ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2))
    init_parameters(model, 0)
    optim = OptimConfig(kind="sgd", weight_decay=0.1)
    return Engine(parallelize(model, groups, Config(optim=optim)), groups, optim, 0)


def batches_of(world, step):
    return Loader(generate_text(400), 8, 0).micro_batches(step * BATCH, BATCH, world.rank, world.size, 1)


def values(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}


def same(before, after):
    return all(torch.equal(before[name], after[name]) for name in before)


def step_with_a_stop(world, asked):
    engine = engine_of(world)
    return [engine.step(step, batches_of(world, step), 0.1, stop=world.rank in asked[step]).stop for step in range(2)]


def test_a_stop_asked_of_one_rank_stops_all(ranks):
    assert ranks(step_with_a_stop, RANKS, [(), (1,)]) == [[False, True], [False, True]]


def step_with_a_bad_parameter(world, kind):
    """Step once with something that is not finite in one place, and once more without it."""
    engine = engine_of(world)
    before = values(engine)

    def poisoned():
        type(engine).reduce(engine)
        if kind == "gradient":  # the same on every rank, as after a reduction, but one rank counts it in the norm
            next(p for name, p in engine.parameters.items() if engine.specs[name].owner == 1).grad.view(-1)[0] = (
                math.inf
            )

    if kind == "loss" and world.rank == 1:
        forward = engine.model.forward
        engine.model.forward = lambda *args, **kwargs: (
            tuple(part * math.inf for part in forward(*args, **kwargs)[:1]) + (1,)
        )
    engine.reduce = poisoned
    bad = engine.step(0, batches_of(world, 0), 0.1)
    del engine.reduce
    untouched = same(before, values(engine))
    engine.model.__dict__.pop("forward", None)
    good = engine.step(1, batches_of(world, 1), 0.1)
    return {
        "bad": (bad.finite, bad.applied),
        "untouched": untouched,
        "good": (good.finite, good.applied),
        "moved": not same(before, values(engine)),
    }


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(ranks, kind):
    expected = {"bad": (False, False), "untouched": True, "good": (True, True), "moved": True}
    assert ranks(step_with_a_bad_parameter, RANKS, kind) == [expected] * RANKS


class Failing:
    """A collective's work that ends, and then says that it failed."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        raise RuntimeError("Connection closed by peer")


def step_with_a_failed_all_reduce(world, use):
    engine = engine_of(world)
    before, real = values(engine), dist.all_reduce
    group = engine.groups[use].process_group

    def all_reduce(tensor, **options):
        work = real(tensor, **options)
        return Failing(work) if options["group"] is group else work

    dist.all_reduce = all_reduce
    try:
        engine.step(0, batches_of(world, 0), 0.1)
    except CommError as error:
        return str(error), same(before, values(engine))
    finally:
        dist.all_reduce = real
    return "no error", same(before, values(engine))


@pytest.mark.parametrize("use", ["loss", "grads", "control"])
def test_a_failed_all_reduce_updates_nothing(ranks, use):
    for message, untouched in ranks(step_with_a_failed_all_reduce, RANKS, use):
        assert f"of '{use}' (ranks 0, 1) failed: Connection closed by peer" in message
        assert untouched
