"""A run that was interrupted and resumed is the run that was not: parameters, moments, rates, masks and data."""

import dataclasses

import torch
from safetensors.torch import load_file

from minidist.comm import World
from minidist.config import CheckpointConfig, Config, DataConfig, OptimConfig, TrainConfig
from minidist.models.config import ModelConfig
from minidist.train.trainer import Trainer


class StopAfter:
    """A request to stop that comes while step number `steps` of this process runs."""

    def __init__(self, steps):
        self._left = steps

    @property
    def requested(self):
        self._left -= 1
        return 15 if self._left == 0 else None


def run(config, steps):
    """Take that many steps and stop, as after SIGTERM."""
    trainer = Trainer(World.single(), config)
    trainer.run(StopAfter(steps))
    trainer.reporter.close()


def tensors_of(folder, step):
    (file,) = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return load_file(file)


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    config = Config(
        model=ModelConfig(
            vocab_size=256, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, dropout=0.1
        ),
        data=DataConfig(source="synthetic", seq_len=8),
        optim=OptimConfig(warmup_steps=3),
        train=TrainConfig(steps=20, global_batch=4, eval_every=0),
        checkpoint=CheckpointConfig(every=0),
        folder=tmp_path / "whole",
    )
    run(config, 5)
    broken = dataclasses.replace(config, folder=tmp_path / "broken")
    run(broken, 2)
    run(dataclasses.replace(broken, checkpoint=CheckpointConfig(every=0, resume=tmp_path / "broken")), 3)
    whole, resumed = tensors_of(tmp_path / "whole", 5), tensors_of(tmp_path / "broken", 5)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
