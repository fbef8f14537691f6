"""Whether a run fits its mesh: said before any rank starts, with the numbers and the nearest that works."""

from minidist import limits
from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.parallel.context import sizes as context
from minidist.parallel.pipeline.ops import Schedule
from minidist.parallel.pipeline.schedules import schedule
from minidist.parallel.tensor import sizes as tensor
from minidist.precision.policy import policy_of


def check(config: Config, world_size: int) -> Mesh:
    """Raise UserError for whatever cannot run on that many ranks; return the mesh."""
    mesh = limits.check(config, world_size)
    pipeline(config, mesh)
    _check_shards(config, mesh)
    policy_of(config.precision)
    how = config.parallel
    try:
        tensor.check(config.model, mesh.tp)
        context.check(config.model, config.data.seq_len, mesh.cp, how.context, tp=mesh.tp, sequence=how.sequence)
    except ValueError as error:
        section = "data" if str(error).startswith("seq_len") else "model"
        raise UserError(f"{section}.{error}.") from None
    return mesh


def _check_shards(config: Config, mesh: Mesh) -> None:
    """What ZeRO shares out, over whom, and how gradients get there."""
    zero, ranks = config.zero, mesh.dp * mesh.cp
    if zero.shard is not None:
        inner = zero.shard // mesh.cp
        if zero.stage == 0 or zero.shard % mesh.cp or not inner or mesh.dp % inner:
            able = [mesh.cp * n for n in range(1, mesh.dp + 1) if mesh.dp % n == 0]
            why = (
                "with zero.stage 0 nothing is shared out"
                if zero.stage == 0
                else f"possible: {', '.join(map(str, able))}"
            )
            raise UserError(
                f"zero.shard is {zero.shard}, of dp={mesh.dp} x cp={mesh.cp} = {ranks} ranks: {why}. "
                + (
                    "Give --zero.stage 1, 2 or 3, or leave --zero.shard out."
                    if zero.stage == 0
                    else "Give one of them."
                )
            )
    if zero.keep_gradients and zero.stage != 2:
        raise UserError(
            f"zero.keep-gradients is for stage 2, and zero.stage is {zero.stage}: stages 0 and 1 always keep whole "
            "gradients, stage 3 never does. Leave --zero.keep-gradients out."
        )
    if config.comm.algorithm != "backend" and zero.stage:
        raise UserError(
            f"comm.algorithm is {config.comm.algorithm}, an all-reduce, and zero.stage {zero.stage} sends gradients by "
            "reduce-scatter. Leave --comm.algorithm out, or give --zero.stage 0."
        )
    if config.comm.gradients == "naive" and (zero.stage or not policy_of(config.precision).uniform):
        raise UserError(
            f"comm.gradients is naive, which is for zero.stage 0 (here {zero.stage}) and one format of all numbers "
            f"(precision.policy {config.precision.policy}). Leave --comm.gradients out."
        )
    if zero.offload and config.device == "cpu":
        raise UserError(
            "zero.offload moves states from a GPU to the host, and device is cpu. Leave --zero.offload out."
        )


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
