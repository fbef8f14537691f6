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
class Layout:
    """The mesh and the ZeRO stage of a run."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name in ("dp", "tp", "pp") if (size := getattr(self, name)) > 1]
        return " ".join([*axes, *([f"zero={self.zero}"] if self.zero else [])]) or "one rank"


@dataclass(frozen=True)
class Trial:
    """One fault in a run on one layout, and the layout on which the run is resumed.

    background: whether checkpoints are written while training goes on. live_recovery: whether the other ranks go on
    when one is killed, and admit a new one.
    """

    number: int
    layout: Layout
    resumed_layout: Layout
    fault: Fault
    background: bool
    live_recovery: bool = False

    def __str__(self) -> str:
        background = "" if self.background else ", saving without a background thread"
        recovery = ", live recovery" if self.live_recovery else ""
        return f"{self.fault}; {self.layout}, then {self.resumed_layout}{background}{recovery}"


def list_layouts(ranks: int) -> list[Layout]:
    """Return the layouts of that many ranks: all divisions over dp, tp and pp, with ZeRO where there are replicas."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    meshes = [(dp, tp, ranks // dp // tp) for dp in divisors for tp in divisors if ranks % (dp * tp) == 0]
    layouts = [Layout(*mesh, zero) for mesh in meshes for zero in (_ZERO_STAGES if mesh[0] > 1 else (0,))]
    return [layout for layout in layouts if layout.pp <= _LAYERS]


def draw_trial(seed: int, number: int, ranks: Sequence[int]) -> Trial:
    """Draw trial `number`, from 0, of a seed: a function of the arguments alone.

    ranks: the numbers of ranks that the runs may have. Every kind of fault occurs in each of its phases once before any
    combination occurs again.
    """
    combinations = [(kind, phase) for kind, phases in KINDS.items() for phase in phases]
    random.Random(f"{seed} order").shuffle(combinations)
    kind, phase = combinations[number % len(combinations)]
    draw = random.Random(f"{seed} {number}")
    layouts = {size: list_layouts(size) for size in sorted(set(ranks))}
    layout = draw.choice(layouts[draw.choice(sorted(layouts))])
    other = draw.choice(layouts[draw.choice(sorted(layouts))])
    step = draw.randrange(SAVE_EVERY, STEPS, SAVE_EVERY) if phase in SAVE_PHASES else draw.randrange(2, STEPS)
    rank = 0 if phase == "rename" else draw.randrange(layout.ranks)
    same = draw.random() < 0.5
    background = draw.random() < 0.75
    live_recovery = kind == "kill" and layout.ranks > 1 and draw.random() < 0.5
    resumed_layout = layout if same else other
    return Trial(number, layout, resumed_layout, Fault(kind, rank, step, phase), background, live_recovery)


def make_config(layout: Layout, text: Path, folder: Path, trial: Trial | None = None) -> Config:
    """Return the configuration of a trial's run: a tiny model, `STEPS` steps of milliseconds, float32, SGD.

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
            every=SAVE_EVERY, keep=_KEPT_WITH_FLIP if flips else _KEPT, background=trial is None or trial.background
        ),
        fault=FaultConfig(
            inject=None if trial is None else str(trial.fault), live_recovery=trial is not None and trial.live_recovery
        ),
        folder=folder,
    )
