"""The estimated host memory of saves in the background, against what a run's saver has allocated."""

import contextlib

import pytest
import torch

from minidist.comm import World
from minidist.config import Config
from minidist.tools.estimate.estimate import estimate
from tests.helpers.small_run import Stop, make_trainer, small_config, with_changes, write_text

LAYOUTS = {
    "replicas": (3, {}),
    "sgd with momentum": (2, {"optim__kind": "sgd", "optim__momentum": 0.9}),
    "muon": (2, {"optim__kind": "muon", "zero__stage": 1}),
    "zero 1": (3, {"zero__stage": 1}),
    "zero 3 in bf16": (2, {"zero__stage": 3, "precision__policy": "bf16"}),
    "masters of replicas": (2, {"precision__policy": "bf16"}),
    "tensor parallel": (4, {"mesh__tp": 2, "parallel__sequence": True}),
    "replicated key heads": (2, {"mesh__tp": 2, "model__num_kv_heads": 1}),
    "tied embedding on two stages": (2, {"mesh__pp": 2, "model__num_layers": 2, "model__tie_embeddings": True}),
    "diloco": (2, {"consistency__mode": "diloco", "consistency__h": 1}),
    "diloco in int8": (2, {"consistency__mode": "diloco", "consistency__h": 1, "consistency__exchange": "int8"}),
    "local": (2, {"consistency__mode": "local", "consistency__h": 1}),
    "diloco with zero 1 inside": (
        4,
        {"consistency__mode": "diloco", "consistency__h": 1, "consistency__replicas": 2, "zero__stage": 1},
    ),
    "tensor parallel and zero 2": (4, {"mesh__tp": 2, "zero__stage": 2}),
}


def allocated_copies(world: World, config: Config) -> int:
    torch.set_num_threads(1)
    with contextlib.closing(make_trainer(world, config)) as trainer:
        trainer.run(Stop())
        return trainer.saver.host_copy_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_are_estimated_to_the_byte_on_every_rank(ranks, tmp_path, name):
    world, changes = LAYOUTS[name]
    config = small_config(tmp_path / "run", write_text(tmp_path), optim__kind="adamw", optim__lr=1e-3, train__steps=2)
    config = with_changes(config, **({"checkpoint__every": 1} | changes))
    expected = [cost.checkpoint_copy_bytes for cost in estimate(config, world).ranks]
    assert list(ranks(allocated_copies, world, config)) == expected and sum(expected) > 10_000
    foreground = with_changes(config, checkpoint__background=False)
    assert not any(cost.checkpoint_copy_bytes for cost in estimate(foreground, world).ranks)
