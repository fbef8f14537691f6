"""The small runs of chapter 07, with the simple trainer: training, saving, dying at a chosen moment, and what happened.

Every function takes the folder of the runs, which has the text in the file `text`.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from minidist.comm import World
from minidist.config import CheckpointConfig, Config, DataConfig, OptimConfig, TrainConfig
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.simple.trainer import Trainer
from minidist.tools.simulate.failures import Phase

SHAPE = ModelConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
PHASES = ("forward", "backward", "decision", "update", "save")
_METHODS = {"forward": "run_layers", "decision": "squared_norm", "update": "clip_and_step_optimizer"}  # of the engine


def write_text(folder: Path) -> None:
    """Write the text of all runs to the file `text` of a folder."""
    (folder / "text").write_bytes(generate_text(9_000).tobytes())


def make_trainer(folder: Path, world: World, run: str = "never saved", save_every: int = 0) -> Trainer:
    """Return this rank's trainer of the run in `folder / run`, resumed from its newest checkpoint if it has one.

    save_every: steps between two saves of `Trainer.run`; 0 for never.
    """
    torch.set_num_threads(1)  # the model is too small for more threads
    config = Config(
        model=SHAPE,
        data=DataConfig(path=folder / "text", seq_len=32),
        optim=OptimConfig(lr=3e-3, warmup_steps=10, schedule="constant"),
        train=TrainConfig(steps=40, global_batch=12, eval_every=0, eval_samples=4),
        checkpoint=CheckpointConfig(every=save_every),
        folder=folder / run,
    )
    return Trainer(world, config)


def train_until(trainer: Trainer, step: int) -> dict[int, float]:
    """Collective: train until `step` steps are completed; return the loss of each new step, by its number."""
    return {number: trainer.step().loss for number in range(trainer.progress.step, step)}


def kill_when_a_file_reaches(num_bytes: int) -> None:
    """Have the operating system kill this process as soon as a file that it writes would exceed `num_bytes` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise OSError instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def save_and_die(save: Callable[[], None], run: Path, moment: float | str) -> None:
    """Call `save`, which writes into the folder `run`, in a forked process that dies at `moment`; wait for its death.

    moment: a fraction of the bytes of the largest file that `run` has by now, "before rename", or "never".
    """

    def child() -> None:
        if moment == "before rename":
            sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
        elif moment != "never":
            largest = max(file.stat().st_size for file in run.rglob("*") if file.is_file())
            kill_when_a_file_reaches(int(moment * largest))
        save()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()


def die_in(trainer: Trainer, phase: str, before: Callable[[], None] = lambda: None) -> None:
    """Make this process kill itself by SIGKILL as soon as its trainer begins a phase of the next step.

    phase: one of PHASES: forward, backward (when it is done, before the last gradients are reduced), decision (before
    its all-reduce), update (after it) or save. before: called just before the kill.
    """
    if phase not in PHASES:
        raise ValueError(f"a step has no phase {phase!r}: it has {', '.join(PHASES)}")

    def die(*_: object) -> None:
        before()
        os.kill(os.getpid(), signal.SIGKILL)

    engine = trainer.engine
    if phase == "save":
        trainer.save = die
    elif phase == "backward":
        engine.reducer.finish = die
    else:
        setattr(engine, _METHODS[phase], die)


def wait_for_file(file: Path) -> None:
    """Wait until a file exists, by which another process says how far it is."""
    while not file.exists():
        time.sleep(0.01)


def join_phases(phases: Iterable[Phase], at_least: float = 0.0) -> list[Phase]:
    """Return the phases, with consecutive ones of one kind joined, so that a long row is drawn without stripes.

    at_least: the time of a shorter phase goes to the phase before it. The unit is that of the phases' times.
    """
    joined: list[Phase] = []
    for phase in phases:
        if joined and (joined[-1].kind == phase.kind or phase.stop - phase.start < at_least):
            joined[-1] = joined[-1]._replace(stop=phase.stop)
        else:
            joined.append(phase)
    return joined
