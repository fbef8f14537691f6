"""Small runs of the simple trainer for the tests of its checkpoints and its recovery: a few thousand parameters."""

import contextlib
import dataclasses
import random
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from exercises.testing import expect
from minidist.comm import Groups, GroupSpec, Meter, World, all_gather_object, bind
from minidist.config import CheckpointConfig, Config, DataConfig, OptimConfig, TrainConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.parameters import named_parameters
from minidist.simple.trainer import Trainer

_BYTES_OF_THREADS = 4 << 30  # of address space, for the threads of all groups of a layout
_GROUPS: dict[tuple, Groups] = {}  # of this process
_WORDS = ("to be", "or not", "that is", "the question", "ay", "there", "\n")


@contextlib.contextmanager
def shared_folder(world: World, group: Any) -> Iterator[Path]:
    """Return a context manager for a temporary folder that all ranks share. Collective.

    The folder has the texts `text` and `other`, and is deleted when all ranks have left the context.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = Path(all_gather_object(own, group)[0])
        if world.rank == 0:
            write_texts(folder)
        all_gather_object(None, group)
        yield folder
        all_gather_object(None, group)


def write_texts(folder: Path) -> None:
    """Write the files `text` and `other`."""
    for name in ("text", "other"):
        words = random.Random(name)
        (folder / name).write_text(" ".join(words.choice(_WORDS) for _ in range(400)))


def make_trainer(
    world: World,
    folder: Path,
    /,
    steps: int = 0,
    trainer_class: type = Trainer,
    observers: Sequence = (),
    **changes: Any,
) -> Trainer:
    """Collective: build a trainer that has no checkpoint, and run `steps` steps: 12 samples, AdamW and dropout.

    trainer_class: the package's, or an answer's. changes: `section__field=value` of the configuration, or
    `field=value`.
    """
    model = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=2, dropout=0.1)
    config = Config(
        model=model,
        data=DataConfig(path=folder / "text", seq_len=16),
        optim=OptimConfig(kind="adamw", lr=0.01, weight_decay=0.1, warmup_steps=4),
        train=TrainConfig(
            steps=20, global_batch=12, micro_batches=2, log_every=100, eval_every=0, eval_samples=4, sample_tokens=0
        ),
        checkpoint=CheckpointConfig(every=0),
        folder=folder / "no checkpoints",
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        value = dataclasses.replace(getattr(config, section), **{field: value}) if field else value
        config = dataclasses.replace(config, **{section: value})
    with mock.patch.dict(vars(sys.modules[trainer_class.__module__]), bind=bind_once):
        trainer = trainer_class(world, config, observers)
    for _ in range(steps):
        trainer.step()
    return trainer


def bind_once(world: World, mesh: Mesh, specs: Sequence[GroupSpec], meter: Meter | None = None) -> Groups:
    """`bind`, once for all trainers of a layout, with more memory for its threads than a check would allow."""
    key = id(world), mesh, tuple(specs)
    if key not in _GROUPS:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            more = soft + _BYTES_OF_THREADS
            resource.setrlimit(resource.RLIMIT_AS, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))
        _GROUPS[key] = bind(world, mesh, specs)
    return _GROUPS[key]


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of all tensors that a rank has between two steps, by name.

    ZeRO stage 3 has no parameters then.
    """
    engine, found = trainer.engine, {}
    if trainer.config.zero.stage < 3:
        found |= {f"parameter {name}": tensor for name, tensor in named_parameters(engine.model).items()}
    for name, master in engine.reducer.masters.items():
        found[f"master of {name}"] = master
        found |= {f"{key} of {name}": value for key, value in engine.optimizer.state.get(master, {}).items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def expect_same_state(got: Trainer, expected: Trainer, case: str) -> None:
    """Fail unless two trainers have the same progress, loss scale and tensors, bit by bit."""
    progress = [(each.progress.step, each.progress.consumed_samples) for each in (got, expected)]
    expect("completed steps and consumed samples", *progress, case=case)
    scalers = [each.engine.scaler and each.engine.scaler.state_dict() for each in (got, expected)]
    expect("the state of the loss scaler", *scalers, case=case)
    tensors, wanted = tensors_of(got), tensors_of(expected)
    expect("the names of all tensors", sorted(tensors), sorted(wanted), case=case)
    for name, tensor in wanted.items():
        expect(name, tensors[name], tensor, case=case)
