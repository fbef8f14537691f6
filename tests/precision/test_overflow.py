"""If scaled gradients overflow on one rank, all ranks skip the step and no state changes."""

import math

import torch

from tests.helpers.zero_engines import build_engine, local_micro_batches, make_config


def steps_with_an_overflow(world, configs) -> list[tuple]:
    """A finite step, one in which rank 1 alone overflows, and a finite step."""
    found = []
    for config in configs:
        engine = build_engine(world, config)
        results = [engine.step(0, local_micro_batches(world, config, 0), 0.1)]
        before, scale = snapshot(engine), engine.scaler.scale

        def poisoned(engine=engine, config=config):
            type(engine).finish_reductions_and_unscale(engine)
            if world.rank == 1 or config.zero.stage == 0:  # where all ranks have the same
                engine.reducer.members[0].gradients.result[0] = math.inf

        engine.finish_reductions_and_unscale = poisoned
        results.append(engine.step(1, local_micro_batches(world, config, 1), 0.1))
        del engine.finish_reductions_and_unscale
        untouched = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        halved = engine.scaler.scale == scale / 2
        results.append(engine.step(2, local_micro_batches(world, config, 2), 0.1))
        moved = not all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        found.append((untouched, halved, moved, [(r.overflowed, r.update_successful, r.is_finite) for r in results]))
        engine.groups.destroy()
    return found


def snapshot(engine) -> list[torch.Tensor]:
    """Copies of all tensors that an update changes."""
    states = [t for state in engine.optimizer.state.values() for t in state.values()]
    parts = [member.flat_param.shard for member in engine.reducer.members]
    return [t.clone() for t in (*engine.reducer.checkpoint_tensors().values(), *parts, *states)]


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_changes_nothing(ranks):
    configs = [make_config(2, stage, "fp16", precision={"initial_scale": 64.0}) for stage in (0, 1, 2, 3)]
    good, bad = (False, True, True), (True, False, False)
    for seen in ranks(steps_with_an_overflow, 2, configs):
        assert seen == [(True, True, True, [good, bad, good])] * len(configs)
