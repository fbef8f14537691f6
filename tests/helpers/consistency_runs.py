"""Small float64 runs of the consistency modes, and comparisons of the parameters that they end with."""

import torch

from minidist.checkpoint.load import load_checkpoint
from minidist.checkpoint.shards import TensorShard
from minidist.comm import World
from minidist.config import OptimConfig
from minidist.models.transformer import Transformer
from minidist.parameters import Box
from tests.helpers.small_run import small_config, train_small, with_changes

SGD = OptimConfig(kind="sgd", lr=0.3, weight_decay=0.0, clip_norm=None, warmup_steps=2)
ADAMW = OptimConfig(lr=0.01, warmup_steps=2, clip_norm=1.0)
EXACT = {"rtol": 1e-12, "atol": 1e-12}
WEIGHTED = {"data__shares": (2.0, 1.0, 3.0), "data__weights": (1.0, 0.5, 2.0)}


def make_config(folder, text, **changes):
    """Six steps in float64, whose samples have uneven lengths; checkpoints after steps 2, 4 and 6."""
    changes = {"optim": SGD, "precision__policy": "fp64", "checkpoint__every": 2, "data__min_length": 3} | changes
    return small_config(folder, text, **changes)


def load_parameters(config, step=6, kind="params"):
    """All parameters in the checkpoint of a step, whatever the layout that saved them."""
    model = Transformer(config.model).to(torch.float64 if config.precision.policy == "fp64" else torch.float32)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shards = [TensorShard(f"{kind}/{n}", t.shape, Box.whole(tuple(t.shape)), t) for n, t in named.items()]
    load_checkpoint(config.folder / "checkpoints" / f"step-{step:08d}", shards, prefix=f"{kind}/")
    return named


def assert_equal_parameters(one, other, **tolerance):
    for name, parameter in one.items():
        torch.testing.assert_close(
            parameter, other[name], **tolerance or EXACT, msg=lambda text, n=name: f"{n}: {text}"
        )


def train(ranks, size, config, **changes):
    config = with_changes(config, **changes)
    ranks(train_small, size, config) if size > 1 else train_small(World.single(), config)
    return load_parameters(config)
