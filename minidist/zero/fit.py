"""Whether ZeRO and the precision of a run can be had on its mesh, and whether they are of use there. Needs no torch."""

from minidist.config import Config
from minidist.errors import UserError
from minidist.mesh import Mesh
from minidist.precision.policy import policy_of


def sharing(config: Config, mesh: Mesh) -> int:
    """How many ranks share out one set of shards; 1 where nothing is shared out."""
    return (config.zero.shard or mesh.dp * mesh.cp) if config.zero.stage else 1


def check(config: Config, mesh: Mesh) -> None:
    """Raise UserError for what cannot be."""
    zero, uniform = config.zero, policy_of(config.precision).uniform
    check_sharing(config, mesh)
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
    if config.comm.gradients == "naive" and (zero.stage or not uniform):
        raise UserError(
            f"comm.gradients is naive, which is for zero.stage 0 (here {zero.stage}) and one format of all numbers "
            f"(precision.policy {config.precision.policy}). Leave --comm.gradients out."
        )
    if zero.offload and config.device == "cpu":
        raise UserError(
            "zero.offload moves states from a GPU to the host, and device is cpu. Leave --zero.offload out."
        )


def check_sharing(config: Config, mesh: Mesh) -> None:
    """Raise UserError when the ranks cannot be cut into sets of `zero.shard`."""
    shard, ranks = config.zero.shard, f"dp={mesh.dp} x cp={mesh.cp} = {mesh.dp * mesh.cp} ranks"
    if shard is None:
        return
    if config.zero.stage == 0:
        raise UserError(
            f"zero.shard is {shard}, and with zero.stage 0 nothing is shared out: give --zero.stage 1, 2 or 3, or "
            "leave --zero.shard out."
        )
    able = [mesh.cp * n for n in range(1, mesh.dp + 1) if mesh.dp % n == 0]
    if shard not in able:
        raise UserError(
            f"zero.shard is {shard}: {ranks} cannot be cut into sets of {shard} that hold whole sequences. "
            f"Possible: --zero.shard {' or '.join(map(str, able))}."
        )


def remarks(config: Config, mesh: Mesh) -> list[str]:
    """What can be had but is of little use here, and what would be of more."""
    zero, said, ranks = config.zero, [], sharing(config, mesh)
    if zero.stage and ranks == 1:
        said.append(
            f"zero.stage {zero.stage} has nothing to share out: one rank holds each part of the model (dp x cp = 1). "
            "It costs nothing and saves nothing."
        )
    micro_batches = config.train.micro_batches
    if zero.stage == 2 and mesh.pp > 1 and not zero.keep_gradients and ranks > 1:
        said.append(
            f"zero.stage 2 under a pipeline reduces gradients in each of {micro_batches} micro-batches; stage 1 sends "
            "them once and holds them whole."
        )
    if zero.stage == 2 and zero.keep_gradients:
        said.append("zero.stage 2 with zero.keep-gradients holds and sends what stage 1 does.")
    if zero.stage == 3 and mesh.pp > 1 and ranks > 1:
        said.append(
            f"zero.stage 3 under a pipeline gathers every layer twice in each of {micro_batches} micro-batches; "
            "stage 1 or 2 sends far less, and the pipeline has cut the parameters already."
        )
    return said
