"""Training runs small enough for a test: a few thousand parameters and bytes of text, steps of milliseconds."""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from minidist.config import CheckpointConfig, Config, DataConfig, OptimConfig, TrainConfig
from minidist.models.config import ModelConfig
from minidist.tools.launch.run import make_observers_and_meter
from minidist.train.trainer import Trainer
from tests.helpers.warm_python import warm_python

WORDS = ("to be", "or not", "that is", "the question", "ay", "there", "\n")
DEADLINE_S = 240.0

# The same run as options of the command line.
OPTIONS = (
    *("--model.hidden-size", "16", "--model.intermediate-size", "24", "--model.num-layers", "1"),
    *("--model.num-heads", "2", "--model.num-kv-heads", "1", "--data.seq-len", "16", "--train.global-batch", "12"),
    *("--train.sample-tokens", "4", "--train.eval-samples", "8", "--device", "cpu"),
)


def write_text(folder: Path, seed: int = 0) -> Path:
    """A text of some six thousand bytes."""
    words = random.Random(seed)
    file = folder / f"text-{seed}.txt"
    file.write_text(" ".join(words.choice(WORDS) for _ in range(1000)))
    return file


def small_config(folder: Path, text: Path, **changes) -> Config:
    """A configuration of 12 samples per step (divisible by 1, 2, 3 and 4), with dropout and SGD.

    changes: `section__field=value`, or `field=value` of `Config` itself.
    """
    config = Config(
        model=ModelConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, dropout=0.1),
        data=DataConfig(path=text, seq_len=16),
        optim=OptimConfig(kind="sgd", lr=0.5, weight_decay=0.0, warmup_steps=2),
        train=TrainConfig(
            steps=6, global_batch=12, micro_batches=2, log_every=1, eval_every=0, eval_samples=8, sample_tokens=0
        ),
        checkpoint=CheckpointConfig(every=3),
        folder=folder,
    )
    return with_changes(config, **changes)


def with_changes(config: Config, **changes) -> Config:
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            value = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: value})
    return config


def with_resume(config: Config, resume: Path, **changes) -> Config:
    """The configuration of a run that resumes from `resume`, with these very options."""
    every = config.checkpoint.every
    return with_changes(config, checkpoint=CheckpointConfig(every=every, resume=resume, inherit=False), **changes)


def read_metrics(folder: Path) -> list[dict]:
    """The rows of the metrics file of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_curve(folder: Path) -> list[dict]:
    """The metrics that two equal runs share: all but times and memory."""
    names = ("step", "tokens", "loss", "grad_norm", "lr", "comm_bytes", "held_out_loss")
    return [{name: row[name] for name in names if name in row} for row in read_metrics(folder) if "step" in row]


class Stop:
    """A request to stop that arrives during step number `after` of this process of `trainer`; never if None."""

    def __init__(self, after: int | None = None, trainer: Trainer | None = None):
        self._trainer, self._at = trainer, None if after is None else trainer.reported_steps + after

    @property
    def signal_name(self) -> str | None:
        return "SIGTERM" if self._at is not None and self._trainer.reported_steps + 1 >= self._at else None


def make_trainer(world, config: Config) -> Trainer:
    """The trainer of `minidist train`, with all its observers."""
    return Trainer(world, config, *make_observers_and_meter(config))


def train_small(world, config: Config, stop_after: int | None = None) -> dict:
    """Train on this rank; returns the summary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small is slower on every further thread
    try:
        with contextlib.closing(make_trainer(world, config)) as trainer:
            return trainer.run(Stop(stop_after, trainer))
    finally:
        torch.set_num_threads(threads)


class Command:
    """A process that runs `minidist ...` (or another module), with its output read line by line.

    It is forked from a warm process (tests/helpers/warm_python.py), unless a program that starts it is the `prefix`.
    """

    def __init__(self, *arguments, module: tuple[str, ...] = ("minidist",), folder: Path, environ=None, prefix=()):
        self.output = ""
        self.process = warm_python.popen(
            [*prefix, sys.executable, "-u", "-m", *module, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()

    def read_until(self, text: str) -> None:
        """Read lines until one holds `text`."""
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed:\n{self.output}")

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        self.output += self.process.stdout.read()
        return self.process.wait(DEADLINE_S)


def descendants(pid: int) -> dict[int, int]:
    """{process id: parent's process id} of all descendants of `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    below: dict[int, int] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        below |= {child: parents[child] for child in level}
    return below


def wait_until_gone(pids, within_s: float = 60.0) -> bool:
    """Wait until none of these processes exists; return False if one still does after `within_s`."""
    end_s = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end_s:
            return False
    return True


def read_checkpoint(folder, step):
    """All tensors of a checkpoint, by name."""
    files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
