"""The options of `minidist consistency`, their checks, and the runs that they select. Needs no torch."""

import dataclasses
import itertools
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from minidist.config import Config, ConsistencyConfig, DataConfig, OptimConfig, PrecisionConfig, TrainConfig
from minidist.errors import UserError
from minidist.models.config import ModelConfig
from minidist.tools.config_warnings import validate_options
from minidist.tools.options import FLAT
from minidist.tools.output_files import PICTURES

ModeName = Literal["synchronous", "central", "local", "diloco", "gossip", "asynchronous", "stale"]
MODES: tuple[ModeName, ...] = ("synchronous", "central", "local", "diloco", "gossip", "asynchronous", "stale")
VIRTUAL = ("asynchronous", "stale")  # train on the virtual clock
# Which options of the section `consistency` a mode uses.
_USED = {
    "central": ("server",),
    "local": ("h",),
    "diloco": ("h", "outer_lr", "outer_momentum", "exchange", "reset_moments"),
    "gossip": ("h",),
    "asynchronous": ("server",),
    "stale": ("server",),
}
# What a comparison does not support, and why.
_UNSUPPORTED = {
    "every rank is a replica of the full model": "mesh.pp mesh.dp mesh.cp mesh.tp zero.stage consistency.replicas",
    "every mode has runs of its own": "consistency.mode folder checkpoint.resume checkpoint.remote trace.file "
    "memory.file",
    "no fault is injected, and no rank replaced": "fault.inject fault.live_recovery",
    "gossip is on a ring": "consistency.topology",
    "replicas are merged whole": "consistency.fragments",
    "the runs are on the CPU": "device",
}


def _small_config() -> Config:
    """Return the default configuration of a comparison: 27,000 parameters, synthetic text, seconds on a laptop."""
    return Config(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1),
        data=DataConfig(source="synthetic", seq_len=32),
        optim=OptimConfig(lr=1e-2, weight_decay=0.0),
        train=TrainConfig(steps=120, global_batch=32),
        consistency=ConsistencyConfig(h=10),
    )


@dataclass(frozen=True)
class ConsistencyOptions:
    """Train one model on one text in every mode of consistency, with equal tokens and seeds, and compare the costs.

    The modes synchronous, central, local, diloco and gossip (see `minidist train --help`, consistency.mode) train on
    live ranks. asynchronous (no barrier: pull, compute, push) and stale (no worker more than --bound steps ahead of the
    slowest) train on a virtual clock: the gradients are real, the times are those of --step-s, --slow and --link-mbit.
    They also train on live ranks once per seed, for the column "live ranks": their loss there differs from run to run.
    Takes the options of `minidist train`; the defaults are a small model, the synthetic text and 120 steps.
    """

    run: Annotated[Config, FLAT] = field(default_factory=_small_config)
    modes: tuple[ModeName, ...] = MODES
    """The modes to compare."""
    ranks: int = 4
    """Ranks of the live modes, workers of the others. Each has the full model."""
    seeds: int = 3
    """Runs per mode, with seeds from train.seed on. The table shows the mean, and half the range as the spread."""
    steps: int | None = None
    """Steps of every run; train.steps when not given."""
    h: tuple[int, ...] | None = None
    """Steps between two merges of local, diloco and gossip: a row for each value; consistency.h when not given."""
    exchange: tuple[Literal["full", "int8"], ...] | None = None
    """How diloco sends the averaged difference: a row for each value; consistency.exchange when not given."""
    bound: tuple[int, ...] | None = None
    """Staleness bounds of stale: a row for each value; 2 when not given."""
    slow: tuple[str, ...] = ()
    """Slow ranks of the virtual clock, each as RANK:FACTOR: 3:2 doubles the duration of each step of rank 3."""
    step_s: float = 0.1
    """Duration of a step's computation on the virtual clock, in seconds."""
    spread: float = 0.0
    """Multiply each duration on the virtual clock by a random number from 1 - spread to 1 + spread."""
    link_mbit: float = 100.0
    """Speed of the link of each rank, in Mbit/s, on the virtual clock."""
    plot: Path | None = None
    """Draw the comparison to this .png, .svg or .pdf."""
    json: Path | None = None
    """Write the comparison to this file as JSON."""
    config: Path | None = None
    """A TOML file with options of `minidist train`; options on the command line take precedence."""


@dataclass(frozen=True)
class Mode:
    """A synchronization mode with its options: one row of the comparison.

    name: of the mode, and its number of local steps or staleness bound if it has one. config: of the training run,
    without a folder. bound: the staleness bound; None for any staleness. on_virtual_clock: whether the mode trains on
    the virtual clock (asynchronous and stale) instead of on live ranks.
    """

    name: str
    config: Config
    bound: int | None = None
    on_virtual_clock: bool = False

    @property
    def live_changes(self) -> dict[str, str | int]:
        """The options of the section `consistency` with which a simulated mode trains on live ranks, too."""
        if self.bound is None:
            return {"mode": "asynchronous"}
        return {"mode": "stale", "staleness_bound": self.bound}


def plan_modes(options: ConsistencyOptions) -> tuple[list[Mode], list[float]]:
    """Return the modes to measure and, by rank, the simulated seconds of a step.

    Raises UserError, with what would work, if the options are invalid.
    """
    _check_option_values(options)
    _check_unsupported(options)
    config = options.run
    if config.data.path is not None and "data.source" not in config.given:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=Config().data.source))
    if options.steps is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=options.steps))
    modes = []
    for name in dict.fromkeys(options.modes):
        own = _make_mode_config(name, config)
        if name in ("local", "diloco", "gossip"):
            exchanges = options.exchange or (config.consistency.exchange,) if name == "diloco" else ("full",)
            for h, exchange in itertools.product(options.h or (config.consistency.h,), exchanges):
                how = dataclasses.replace(own.consistency, h=h, exchange=exchange)
                title = f"{name} h={h}" + " int8" * (exchange == "int8")
                modes.append(Mode(title, dataclasses.replace(own, consistency=how)))
        elif name == "stale":
            modes += [Mode(f"stale s={bound}", own, bound, on_virtual_clock=True) for bound in options.bound or (2,)]
        else:
            modes.append(Mode(name, own, on_virtual_clock=name == "asynchronous"))
    for mode in modes:
        if mode.on_virtual_clock:
            _check_simulated_mode(mode, options.ranks)
        try:
            validate_options(
                mode.config if not mode.on_virtual_clock else _make_mode_config("synchronous", config), options.ranks
            )
        except UserError as error:
            raise UserError(
                str(error).replace("--consistency.h ", "--h ").replace("--train.steps ", "--steps ")
            ) from None
    return modes, _parse_step_times(options)


def _make_mode_config(name: str, config: Config) -> Config:
    """Return the configuration of the runs in mode `name`, without the `consistency` options of other modes."""
    how = {field: getattr(config.consistency, field) for field in _USED.get(name, ())}
    consistency = ConsistencyConfig(mode="synchronous" if name in VIRTUAL else name, **how)
    return dataclasses.replace(
        config,
        consistency=consistency,
        given=frozenset(option for option in config.given if not option.startswith("consistency.")),
        device="cpu",
        train=dataclasses.replace(config.train, eval_every=0, sample_tokens=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0, background=False),
    )


def _check_option_values(options: ConsistencyOptions) -> None:
    """Raise UserError for values out of range and options that no selected mode uses."""
    for name, least in (("ranks", 1), ("seeds", 1)):
        if (value := getattr(options, name)) < least:
            raise UserError(f"--{name} is {value}; give --{name} {least} or more.")
    for name in ("step_s", "link_mbit"):
        if not 0 < (value := getattr(options, name)) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be above 0.")
    if not 0 <= options.spread < 1:
        raise UserError(f"--spread is {options.spread}; it must be 0 or more and below 1.")
    if not options.modes:
        raise UserError(f"--modes is empty: give some of {' '.join(MODES)}.")
    if options.bound and "stale" not in options.modes:
        raise UserError(
            f"--bound {' '.join(map(str, options.bound))} has no effect: it is for stale, and --modes is "
            f"{' '.join(options.modes)}. Add stale to --modes, or leave --bound out."
        )
    if options.bound is not None and min(options.bound, default=-1) < 0:
        raise UserError(f"--bound is {' '.join(map(str, options.bound))}: give staleness bounds of 0 or more.")
    for path, name, endings in ((options.plot, "plot", PICTURES), (options.json, "json", ())):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"--{name} {path}: there is no folder {path.absolute().parent}. Make it first.")
        if path is not None and endings and path.suffix not in endings:
            raise UserError(f"--{name} {path} must be a picture: give a name that ends in {', '.join(endings)}.")


def _check_unsupported(options: ConsistencyOptions) -> None:
    """Raise UserError for options of `minidist train` that a comparison sets itself or cannot use."""
    config, default = options.run, Config()
    for why, names in _UNSUPPORTED.items():
        for name in names.split():
            read = attrgetter(name)
            given = name == "consistency.mode" and name in config.given
            if (value := read(config)) != read(default) or given:
                instead = "give --modes instead" if name == "consistency.mode" else "leave it out"
                raise UserError(f"--{name.replace('_', '-')} {value}: in a comparison {why}; {instead}.")
    used = {field for name in options.modes for field in _USED.get(name, ())}
    for name in ("server", "outer_lr", "outer_momentum", "reset_moments", "h", "exchange"):
        given = f"consistency.{name.replace('_', '-')}" in config.given
        given |= getattr(config.consistency, name) != getattr(_small_config().consistency, name)
        given |= getattr(options, name, None) is not None
        if given and name not in used:
            users = " ".join(mode for mode, fields in _USED.items() if name in fields)
            section = "" if hasattr(options, name) else "consistency."
            raise UserError(
                f"--{section}{name.replace('_', '-')} has no effect: it is for {users}, and --modes is "
                f"{' '.join(options.modes)}. Leave it out, or add one of them to --modes."
            )


def _check_simulated_mode(mode: Mode, ranks: int) -> None:
    """Raise UserError if a mode in simulated time cannot train with this configuration."""
    config = mode.config
    if (
        config.train.micro_batches > 1
        or config.train.max_skipped_steps
        or config.precision != PrecisionConfig(policy="fp64" if config.precision.policy == "fp64" else "fp32")
    ):
        raise UserError(
            f"{mode.name} trains on the virtual clock, in fp32 or fp64 and with one micro-batch per step and worker: "
            "leave --train.micro-batches, --train.max-skipped-steps and other --precision options out, or leave "
            f"{mode.name.split()[0]} out of --modes."
        )
    if not 0 <= config.consistency.server < ranks:
        raise UserError(
            f"consistency.server is {config.consistency.server}, and the ranks are 0 to {ranks - 1}: give "
            "--consistency.server 0."
        )


def _parse_step_times(options: ConsistencyOptions) -> list[float]:
    """Return the simulated seconds of a step, by rank, from `--step-s` and `--slow`."""
    compute_s = [options.step_s] * options.ranks
    for word in options.slow:
        rank, _, factor = word.partition(":")
        try:
            at, times = int(rank), float(factor)
        except ValueError:
            at, times = -1, 0.0
        if not (0 <= at < options.ranks and 0 < times < float("inf")):
            raise UserError(
                f"--slow {word!r} is not RANK:FACTOR, a rank from 0 to {options.ranks - 1} and a factor above 0: give "
                f"--slow {options.ranks - 1}:2 for a rank of half the speed."
            )
        compute_s[at] = options.step_s * times
    return compute_s
