"""Trials drawn from a seed: the layout of a run, the fault, and the layout on which the run is resumed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidist.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    FaultConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    ZeroConfig,
)
from minidist.models.config import ModelConfig
from minidist.tools.chaos.faults import KINDS, SAVE_PHASES, Fault

STEPS, SAVE_EVERY = 20, 4
_LAYERS = 2
_ZERO_STAGES = (0, 1, 3)
_KEPT, _KEPT_WITH_FLIP = 2, STEPS  # a checkpoint from before the flipped bit must still be there


@dataclass(frozen=True)
class TrialLayout:
    """The mesh of a chaos trial's run and its ZeRO stage."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name in ("dp", "tp", "pp") if (size := getattr(self, name)) > 1]
        return " ".join([*axes, *([f"zero={self.zero}"] if self.zero else [])]) or "one rank"


@dataclass(frozen=True)
class Trial:
    """One chaos trial: a run with a fault, and a second run that resumes it from a checkpoint.

    number: the number of the trial, from 0. layout: of the run with the fault. resumed_layout: of the second run.
    saves_in_background: whether the first run writes checkpoints while it trains. live_recovery: whether the other
    ranks continue without a restart when one is killed, and admit a new one.
    """

    number: int
    layout: TrialLayout
    resumed_layout: TrialLayout
    fault: Fault
    saves_in_background: bool
    live_recovery: bool = False

    def __str__(self) -> str:
        background = "" if self.saves_in_background else ", saving without a background thread"
        recovery = ", live recovery" if self.live_recovery else ""
        return f"{self.fault}; {self.layout}, then {self.resumed_layout}{background}{recovery}"


def list_layouts(ranks: int) -> list[TrialLayout]:
    """Return all layouts of `ranks` ranks: every division over dp, tp and pp, with ZeRO stages where dp is above 1."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    meshes = [(dp, tp, ranks // dp // tp) for dp in divisors for tp in divisors if ranks % (dp * tp) == 0]
    layouts = [TrialLayout(*mesh, zero) for mesh in meshes for zero in (_ZERO_STAGES if mesh[0] > 1 else (0,))]
    return [layout for layout in layouts if layout.pp <= _LAYERS]


def draw_trial(seed: int, number: int, world_sizes: Sequence[int]) -> Trial:
    """Draw trial `number`, counted from 0, at random; equal arguments give the same trial.

    world_sizes: the possible numbers of ranks of a run. A trial's fault is a pair of a kind and a phase in which it is
    injected (see `KINDS`). Successive trials go through all pairs in random order before any pair is repeated.
    """
    combinations = [(kind, phase) for kind, phases in KINDS.items() for phase in phases]
    random.Random(f"{seed} order").shuffle(combinations)
    kind, phase = combinations[number % len(combinations)]
    draw = random.Random(f"{seed} {number}")
    layouts = {size: list_layouts(size) for size in sorted(set(world_sizes))}
    layout = draw.choice(layouts[draw.choice(sorted(layouts))])
    other = draw.choice(layouts[draw.choice(sorted(layouts))])
    step = draw.randrange(SAVE_EVERY, STEPS, SAVE_EVERY) if phase in SAVE_PHASES else draw.randrange(2, STEPS)
    rank = 0 if phase == "rename" else draw.randrange(layout.num_ranks)
    same = draw.random() < 0.5
    background = draw.random() < 0.75
    live_recovery = kind == "kill" and layout.num_ranks > 1 and draw.random() < 0.5
    resumed_layout = layout if same else other
    return Trial(number, layout, resumed_layout, Fault(kind, rank, step, phase), background, live_recovery)


def make_config(layout: TrialLayout, text: Path, folder: Path, trial: Trial | None = None) -> Config:
    """Make the configuration of a trial's run: a tiny model, `STEPS` steps of milliseconds, float32, SGD.

    layout: the mesh and ZeRO stage. text: the file to train on. folder: the run folder. trial: the trial whose fault is
    injected, and which decides on background saves and live recovery; None for an uninterrupted or resumed run.
    """
    flips = trial is not None and trial.fault.kind == "flip"
    return Config(
        model=ModelConfig(hidden_size=16, intermediate_size=32, num_layers=_LAYERS, num_heads=4, num_kv_heads=4),
        data=DataConfig(path=text, seq_len=16),
        mesh=MeshConfig(dp=layout.dp, tp=layout.tp, pp=layout.pp),
        zero=ZeroConfig(stage=layout.zero),
        optim=OptimConfig(kind="sgd", lr=0.1, weight_decay=0.0, warmup_steps=2),
        train=TrainConfig(
            steps=STEPS,
            global_batch=8,
            micro_batches=1 if layout.pp == 1 else 2,
            log_every=1,
            eval_every=0,
            eval_samples=8,
            sample_tokens=0,
        ),
        checkpoint=CheckpointConfig(
            every=SAVE_EVERY,
            keep=_KEPT_WITH_FLIP if flips else _KEPT,
            background=trial is None or trial.saves_in_background,
        ),
        fault=FaultConfig(
            inject=None if trial is None else str(trial.fault), live_recovery=trial is not None and trial.live_recovery
        ),
        folder=folder,
    )
