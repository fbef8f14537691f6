"""A stop or a skipped step on one rank holds for all ranks, and after a failed collective nothing is updated."""

import math
from functools import partial

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


def build_engine(world):
    groups = bind(world, Mesh(dp=world.size), DEFAULT_GROUP_SPECS)
    model = Transformer(ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2))
    init_parameters(model, 0)
    optim = OptimConfig(kind="sgd", weight_decay=0.1)
    return Engine(parallelize(model, groups, Config(optim=optim)), groups, optim, 0)


def local_micro_batches(world, step):
    return Loader(generate_text(400), 8, 0).micro_batches(step * BATCH, BATCH, world.rank, world.size, 1)


def copy_parameters(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}


def all_equal(before, after):
    return all(torch.equal(before[name], after[name]) for name in before)


def step_with_a_stop(world, asked):
    engine = build_engine(world)

    def asks(step):
        return world.rank in asked[step]

    return [
        engine.step(step, local_micro_batches(world, step), 0.1, is_stop_requested=partial(asks, step)).stop_requested
        for step in range(2)
    ]


def test_a_stop_request_on_one_rank_stops_all(ranks):
    assert ranks(step_with_a_stop, RANKS, [(), (1,)]) == [[False, True], [False, True]]


def step_with_a_bad_parameter(world, kind):
    """Take one step with a non-finite loss or gradient on one rank, and one step without."""
    engine = build_engine(world)
    before = copy_parameters(engine)

    def poisoned():
        type(engine).finish_reductions_and_unscale(engine)
        if kind == "gradient":  # the same on every rank, as after a reduction, but one rank counts it in the norm
            next(p for name, p in engine.parameters.items() if engine.specs[name].owner == 1).grad.view(-1)[0] = (
                math.inf
            )

    if kind == "loss" and world.rank == 1:
        forward = engine.model.forward
        engine.model.forward = lambda *args, **kwargs: (
            tuple(part * math.inf for part in forward(*args, **kwargs)[:1]) + (1,)
        )
    engine.finish_reductions_and_unscale = poisoned
    bad = engine.step(0, local_micro_batches(world, 0), 0.1)
    del engine.finish_reductions_and_unscale
    untouched = all_equal(before, copy_parameters(engine))
    engine.model.__dict__.pop("forward", None)
    good = engine.step(1, local_micro_batches(world, 1), 0.1)
    return {
        "bad": (bad.is_finite, bad.update_successful),
        "untouched": untouched,
        "good": (good.is_finite, good.update_successful),
        "moved": not all_equal(before, copy_parameters(engine)),
    }


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_non_finite_value_on_one_rank_skips_the_step_on_all(ranks, kind):
    expected = {"bad": (False, False), "untouched": True, "good": (True, True), "moved": True}
    assert ranks(step_with_a_bad_parameter, RANKS, kind) == [expected] * RANKS


class FailingWork:
    """A collective's work that ends, and then says that it failed."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        raise RuntimeError("Connection closed by peer")


def step_with_a_failed_all_reduce(world, use):
    engine = build_engine(world)
    before, real = copy_parameters(engine), dist.all_reduce
    group = engine.groups[use].process_group

    def all_reduce(tensor, **options):
        work = real(tensor, **options)
        return FailingWork(work) if options["group"] is group else work

    dist.all_reduce = all_reduce
    try:
        engine.step(0, local_micro_batches(world, 0), 0.1)
    except CommError as error:
        return str(error), all_equal(before, copy_parameters(engine))
    finally:
        dist.all_reduce = real
    return "no error", all_equal(before, copy_parameters(engine))


@pytest.mark.parametrize("use", ["loss", "grads", "control"])
def test_a_failed_all_reduce_updates_nothing(ranks, use):
    for message, untouched in ranks(step_with_a_failed_all_reduce, RANKS, use):
        assert f"of '{use}' (ranks 0, 1) failed: Connection closed by peer" in message
        assert untouched
