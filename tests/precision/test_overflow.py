"""A step whose scaled gradients overflow on one rank is skipped by all, and leaves every bit as it was."""

import math

import torch

from tests.helpers.zero_engines import batches_of, configured, engine_of


def skipped(world, configs) -> list[tuple]:
    """One good step, one in which rank 1 alone overflows, one good step."""
    found = []
    for config in configs:
        engine = engine_of(world, config)
        results = [engine.step(0, batches_of(world, config, 0), 0.1)]
        before, scale = snapshot(engine), engine.scaler.scale

        def poisoned(engine=engine, config=config):
            type(engine).reduce(engine)
            if world.rank == 1 or config.zero.stage == 0:  # where all ranks have the same
                engine.reducer.members[0].gradients.result[0] = math.inf

        engine.reduce = poisoned
        results.append(engine.step(1, batches_of(world, config, 1), 0.1))
        del engine.reduce
        untouched = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        halved = engine.scaler.scale == scale / 2
        results.append(engine.step(2, batches_of(world, config, 2), 0.1))
        moved = not all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        found.append((untouched, halved, moved, [(r.overflow, r.applied, r.finite) for r in results]))
        engine.groups.destroy()
    return found


def snapshot(engine) -> list[torch.Tensor]:
    """Everything that an update changes, bit by bit."""
    states = [t for state in engine.optimizer.state.values() for t in state.values()]
    parts = [member.flat_param.part for member in engine.reducer.members]
    return [t.clone() for t in (*engine.reducer.checkpoint_tensors().values(), *parts, *states)]


def test_an_overflow_of_one_rank_is_skipped_by_all_and_leaves_every_bit(ranks):
    configs = [configured(2, stage, "fp16", precision={"initial_scale": 64.0}) for stage in (0, 1, 2, 3)]
    good, bad = (False, True, True), (True, False, False)
    for seen in ranks(skipped, 2, configs):
        assert seen == [(True, True, True, [good, bad, good])] * len(configs)
