"""Ranks with other options or other code end with one message; a state that is not finite is never saved."""

import shutil
from pathlib import Path

import pytest
import torch

import minidist
from minidist.comm import World
from minidist.config import OptimConfig
from minidist.errors import RunError, UserError
from minidist.train import same_program
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer
from tests.helpers.small_run import Stop, small_config, with_changes, write_text


def refusal(world, configs, package=None):
    if package is not None and world.rank == 1:
        same_program.minidist = type("Package", (), {"__file__": str(package / "__init__.py")})
    try:
        Trainer(world, configs[world.rank]).close()
    except UserError as error:
        return str(error)
    finally:
        same_program.minidist = minidist


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim__lr": 0.25}, "optim.lr is 0.5 on ranks 0, 2, 0.25 on rank 1"),
        ({"train__seed": 7}, "train.seed is 1234 on ranks 0, 2, 7 on rank 1"),
        ({"model__rope_theta": 5e5}, "model.rope-theta is"),
        ({"mesh__pp": 3, "model__num_layers": 3}, "mesh.pp is 1 on ranks 0, 2, 3 on rank 1"),
        (
            {"zero__stage": 3, "train__global_batch": 24},
            "zero.stage is 0 on ranks 0, 2, 3 on rank 1; train.global-batch",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_with_other_options_are_refused_by_name_and_value(ranks, tmp_path, changes, said):
    config = small_config(tmp_path / "run", write_text(tmp_path))
    configs = [config, with_changes(config, **changes), config]
    messages = set(ranks(refusal, 3, configs))
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None, "no rank was refused"
    assert message.startswith("the ranks were started with different options: ") and said in message
    assert not (tmp_path / "run").exists()


def test_ranks_may_have_given_the_same_options_in_another_way(ranks, tmp_path):
    """On the command line, in a file, in another order, or not at all where it is the default."""
    config = small_config(tmp_path / "run", write_text(tmp_path))
    given = with_changes(config, given=frozenset({"train.seed", "optim.lr"}))
    assert ranks(refusal, 2, [config, given]) == [None, None]


def test_ranks_with_other_source_are_refused_by_the_file(ranks, tmp_path):
    package = tmp_path / "minidist"
    shutil.copytree(Path(minidist.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    config = small_config(tmp_path / "run", write_text(tmp_path))
    assert ranks(refusal, 2, [config, config], package) == [None, None]
    with (package / "train" / "engine.py").open("a") as file:
        file.write("# another line\n")
    (message, other) = ranks(refusal, 2, [config, config], package)
    assert message == other and message.startswith("the ranks run different code: file train/engine.py is ")


def test_folders_and_paths_may_differ(ranks, tmp_path):
    text = write_text(tmp_path)
    copy = tmp_path / "other" / text.name
    copy.parent.mkdir()
    shutil.copy(text, copy)
    configs = [small_config(tmp_path / "run", text), small_config(tmp_path / "elsewhere", copy)]
    assert ranks(refusal, 2, configs) == [None, None]


class Poison(Observer):
    """Puts NaN or infinity into one element of the state of one rank after `step` steps, where no loss shows it."""

    def __init__(self, kind, value, rank, step):
        self.kind, self.value, self.rank, self.step = kind, value, rank, step

    def on_step(self, trainer, result):
        if trainer.world.rank == self.rank and trainer.progress.step == self.step:
            engine = trainer.engine
            name, master = next(iter(engine.reducer.masters.items()))
            tensor = master if self.kind == "params" else engine.optimizer.state[master][self.kind]
            tensor.detach().view(-1)[-1] = self.value


def train_poisoned(world, config, kind, value):
    trainer = Trainer(world, config, [Poison(kind, value, world.size - 1, 4)])
    try:
        trainer.run(Stop())
    except RunError as error:
        return str(error)
    finally:
        trainer.close()


@pytest.mark.parametrize(("kind", "value"), [("params", torch.nan), ("exp_avg_sq", torch.inf), ("exp_avg", torch.nan)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_state_that_is_not_finite_is_never_saved_and_the_checkpoint_before_it_stays(
    ranks, tmp_path, kind, value, size
):
    config = small_config(
        tmp_path / "run", write_text(tmp_path), optim=OptimConfig(), checkpoint__every=2, checkpoint__keep=1
    )
    config = with_changes(config, zero__stage=1, mesh__dp=size)
    run = train_poisoned if size > 1 else None
    messages = ranks(run, 2, config, kind, value) if run else [train_poisoned(World.single(), config, kind, value)]
    assert len(set(messages)) == 1
    label = "params/" if kind == "params" else f"optimizer.{kind}/"
    assert (
        f"the state after step 4 is not finite, so it is not saved; the first tensor that is not: {label}"
        in messages[0]
    )
    saved = list((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-00000002"]
    assert "The last checkpoint is" in messages[0]
