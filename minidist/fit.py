"""Whether a run fits its mesh: said before any rank starts, with the numbers and the nearest that works."""

from minidist import limits
from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.parallel.context import sizes as context
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.schedules import schedule
from minidist.parallel.tensor import sizes as tensor
from minidist.zero import fit as shards


def check(config: Config, world_size: int) -> Mesh:
    """Raise UserError for whatever cannot run on that many ranks; return the mesh."""
    mesh = limits.check(config, world_size)
    _compiled(config, pipeline(config, mesh))
    shards.check(config, mesh)
    _optimizer(config, mesh)
    how = config.parallel
    try:
        tensor.check(config.model, mesh.tp)
        context.check(config.model, config.data.seq_len, mesh.cp, how.context, tp=mesh.tp, sequence=how.sequence)
    except ValueError as error:
        section = "data" if str(error).startswith("seq_len") else "model"
        raise UserError(f"{section}.{error}.") from None
    return mesh


def _compiled(config: Config, schedule: Schedule | None) -> None:
    """Raise UserError for what cannot be done with layers that are compiled."""
    if not config.compile:
        return
    if schedule is not None and schedule.splits_backward:
        raise UserError(
            f"compile is on and parallel.schedule is {schedule.kind}, whose backward comes in two halves; that of a "
            "compiled layer is one piece: give --no-compile, or --parallel.schedule 1f1b or interleaved."
        )
    if config.recompute == "selective":
        raise UserError(
            "compile is on and recompute is selective: a compiled layer is one piece, and what of it is computed again "
            "the compiler decides: give --recompute none or block, or --no-compile."
        )


def remarks(config: Config, mesh: Mesh) -> list[str]:
    """What a run may do but has little use for, one sentence each."""
    return shards.remarks(config, mesh)


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


def _optimizer(config: Config, mesh: Mesh) -> None:
    if config.optim.kind == "muon" and mesh.tp > 1:
        raise UserError(
            f"optim.kind is muon and mesh.tp is {mesh.tp}: Muon's update of a matrix needs all of it, and each tp rank "
            "has a part. Give --mesh.tp 1, or --optim.kind adamw."
        )
