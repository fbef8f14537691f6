"""The limits of every option by itself: what cannot be on any mesh, and what a mesh's size decides."""

import math
import re

from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh

# Smallest and largest value of each number, by option.
_RANGES: dict[str, tuple[float, float]] = {
    "train.steps": (1, math.inf),
    "train.global-batch": (1, math.inf),
    "train.micro-batches": (1, math.inf),
    "train.seed": (0, 2**63 - 1),
    "train.log-every": (1, math.inf),
    "train.eval-every": (0, math.inf),
    "train.eval-samples": (1, math.inf),
    "train.sample-tokens": (0, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
    "precision.initial-scale": (1e-30, 1e30),  # float32 has the scales around it too
    "precision.growth-interval": (1, math.inf),
    "precision.max-overflows": (1, math.inf),
    "zero.shard": (1, math.inf),
    "trace.first": (1, math.inf),
    "trace.steps": (1, math.inf),
    "memory.step": (1, math.inf),
    "data.seq-len": (1, math.inf),
    "optim.lr": (0, math.inf),
    "optim.weight-decay": (0, math.inf),
    "optim.momentum": (0, 1),
    "optim.muon-momentum": (0, 1),
    "optim.muon-steps": (1, 20),
    "optim.warmup-steps": (0, math.inf),
    "optim.min-lr-fraction": (0, 1),
    "optim.decay-fraction": (0, 1),
}
_ABOVE_ZERO = ("optim.eps", "optim.clip-norm", "optim.muon-lr-ratio", "comm.bucket-mib", "comm.timeout-s")


def check(config: Config, world_size: int) -> Mesh:
    """Raise UserError for whatever cannot run, before any rank starts; return the mesh."""
    mesh = config.mesh_of(world_size)
    try:
        config.model.validate()
    except ValueError as error:
        raise UserError(f"model.{error}.") from None
    check_numbers(config)
    train, data = config.train, config.data
    if data.seq_len > config.model.max_seq_len:
        raise UserError(
            f"data.seq-len is {data.seq_len}, the model accepts at most {config.model.max_seq_len} tokens: "
            f"give --data.seq-len {config.model.max_seq_len} or less, or --model.max-seq-len {data.seq_len}."
        )
    if data.min_length is not None and not 1 <= data.min_length <= data.seq_len:
        raise UserError(f"data.min-length is {data.min_length}; it must be from 1 to data.seq-len ({data.seq_len}).")
    for name, done in (("trace.first", "recorded"), ("memory.step", "measured")):
        if (_value(config, name) or 0) > train.steps:
            raise UserError(
                f"{name} is {_value(config, name)}, and the run ends at step {train.steps}: nothing would be {done}. "
                f"Give --{name} {train.steps} or less."
            )
    parts = mesh.dp * train.micro_batches
    if train.global_batch < parts:
        fewer = train.global_batch // mesh.dp
        raise UserError(
            f"a global batch of {train.global_batch} samples cannot fill dp={mesh.dp} ranks x "
            f"{train.micro_batches} micro-batches = {parts} parts (world size {world_size}, {mesh}): "
            f"give --train.global-batch {parts} or more"
            + (
                f", or --train.micro-batches {fewer} or fewer."
                if fewer
                else f", or --mesh.dp {train.global_batch} or fewer."
            )
        )
    for name, values in (("shares", data.shares), ("weights", data.weights)):
        if values is not None and (
            len(values) != mesh.dp or not all(0 <= v < math.inf for v in values) or not any(values)
        ):
            raise UserError(
                f"data.{name} is {' '.join(map(str, values))} ({len(values)} numbers): it needs one per data-parallel "
                f"rank ({mesh.dp}), none below 0 and at least one above 0."
            )
    return mesh


def check_numbers(config: Config) -> None:
    """Raise UserError for a number that no run can have."""
    for name, (least, most) in _RANGES.items():
        value = _value(config, name)
        if value is not None and not (least <= value <= most and abs(value) < math.inf):
            needed = f"from {least} to {most}" if most < math.inf else f"{least} or more"
            raise UserError(f"{name} is {value}; it must be {needed}: change --{name}.")
    for name in _ABOVE_ZERO:
        value = _value(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; it must be above 0: change --{name}.")
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise UserError(
            f"optim.betas is {config.optim.betas}; both must be 0 or more and below 1: change --optim.betas."
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(f"device is {config.device!r}; possible: auto, cpu, cuda, or one GPU for all ranks: cuda:0.")


def _value(config: Config, name: str):
    section, field_name = name.replace("-", "_").split(".")
    return getattr(getattr(config, section), field_name)
