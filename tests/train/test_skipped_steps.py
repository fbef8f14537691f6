"""Steps with a non-finite loss or gradient: skipped by all ranks, counted, and the end of the run after too many."""

import contextlib
import math

import pytest

from minidist.errors import RunError
from tests.helpers.small_run import Stop, make_trainer, read_metrics, small_config, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def train_with_nan(world, config, bad_steps, bad_rank):
    """Train; in `bad_steps`, counted from 1, one gradient element that `bad_rank` owns is NaN.

    Returns whether each step left this rank's parameters as they were, and the numbers of skipped steps.
    """
    with contextlib.closing(make_trainer(world, config)) as trainer:
        engine, unchanged = trainer.engine, []
        finish_reductions_and_unscale, step = engine.finish_reductions_and_unscale, engine.step

        def poisoned():
            finish_reductions_and_unscale()
            if trainer.progress.step + 1 in bad_steps and world.rank == bad_rank:
                owned = (
                    g for n, g in engine.reducer.gradients().items() if engine.reducer.master_specs[n].owner == bad_rank
                )
                next(owned).view(-1)[0] = math.nan

        def compared(*args, **kwargs):
            before = {name: p.detach().clone() for name, p in engine.parameters.items()}
            result = step(*args, **kwargs)
            unchanged.append(all(before[name].equal(p) for name, p in engine.parameters.items()))
            return result

        engine.finish_reductions_and_unscale, engine.step = poisoned, compared
        trainer.run(Stop())
        return unchanged, trainer.skipped_steps.total


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (3, 1)])
def test_non_finite_steps_change_nothing_on_any_rank_and_the_run_goes_on(ranks, tmp_path, text, size, stage):
    config = small_config(tmp_path / "run", text, train__max_skipped_steps=2, zero__stage=stage)
    values = ranks(train_with_nan, size, config, (2, 3, 5), size - 1)
    assert values == [([False, True, True, False, True, False], 3)] * size
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["skipped"] for row in rows] == [False, True, True, False, True, False]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2, 3, 3]
    assert [row["grad_norm"] is None for row in rows] == [row["skipped"] for row in rows]


@pytest.mark.parametrize(("limit", "last"), [(0, 2), (1, 3)])
def test_one_more_than_the_limit_ends_the_run(server, tmp_path, text, limit, last):
    config = small_config(tmp_path / "run", text, train__max_skipped_steps=limit, checkpoint__every=1)
    with pytest.raises(RunError, match=rf"^step {last}: the reduced gradient is not finite") as caught:
        server.run(train_with_nan, 2, (config, (2, 3, 4), 1), deadline_s=60)
    message = str(caught.value)
    assert ("No parameter was updated in the last 2 steps." in message) == (limit == 1)
    assert "Lower --optim.lr" in message and "The last checkpoint is" in message


def test_each_skipped_step_is_printed_with_the_first_bad_tensor(server, tmp_path, text):
    config = small_config(tmp_path / "run", text, train__max_skipped_steps=1)
    printed = server.run(train_with_nan, 2, (config, (3,), 0), deadline_s=60).output[0]
    (line,) = [line for line in printed.splitlines() if "was skipped" in line]
    assert line.startswith("step 3: the reduced gradient is not finite; the first tensor that is not: model.")
    assert line.endswith("The step was skipped (1 of at most 1 in sequence).")
    assert "step      3  loss 4." in printed or "step      3  loss 5." in printed
    assert "grad norm not finite" in printed
