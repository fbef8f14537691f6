"""Whether a run fits its mesh: said before any rank starts, with the numbers and the nearest that works."""

import math

from minidist import config as configuration
from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.parallel.pipeline.ops import Schedule
from minidist.parallel.pipeline.schedules import schedule
from minidist.parallel.tensor import sizes


def check(config: Config, world_size: int) -> Mesh:
    """Raise UserError for whatever cannot run on that many ranks; return the mesh."""
    mesh = configuration.check(config, world_size)
    pipeline(config, mesh)
    try:
        sizes.check(config.model, mesh.tp)
    except ValueError as error:
        raise UserError(f"model.{error}.") from None
    _check_sequence(config, mesh)
    return mesh


def pipeline(config: Config, mesh: Mesh) -> Schedule | None:
    """The schedule of a run, None where there is one stage. Raises UserError when the model has too few layers for it,
    or the step too few micro-batches."""
    if mesh.pp == 1:
        return None
    made = schedule(config.parallel.schedule, mesh.pp, config.train.micro_batches, config.parallel.chunks)
    layers = config.model.num_layers
    if layers < made.positions:
        each = f" x {made.chunks} chunks = {made.positions} parts" if made.chunks > 1 else ""
        fits = layers // made.chunks
        fewer = f"--mesh.pp {fits}" if fits > 1 else "--mesh.pp 1"
        raise UserError(
            f"mesh.pp is {mesh.pp}: {mesh.pp} stages{each} need a layer each, and the model has {layers}: "
            f"give {fewer}, or --model.num-layers {made.positions}."
        )
    return made


def _check_sequence(config: Config, mesh: Mesh) -> None:
    """Whether the sequence can be cut into equal parts."""
    seq_len, cp, tp = config.data.seq_len, mesh.cp, mesh.tp
    halves = 2 if cp > 1 and config.parallel.context == "ring" else 1  # a rank of a ring holds two pieces
    parts = cp * math.lcm(halves, tp if config.parallel.sequence else 1)
    if seq_len % parts:
        low = seq_len // parts * parts
        near = f"{low} or {low + parts}" if low else str(parts)
        raise UserError(
            f"data.seq-len is {seq_len}, and cp={cp} x tp={tp} ranks share a sequence in {parts} equal parts: give "
            f"--data.seq-len {near}."
        )
