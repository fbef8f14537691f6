"""The process groups of a mesh: the solution, as it stands in minidist.simple.parallelize.

A group is declared by the coordinates that may differ, not by a list of ranks, so one declaration fits every mesh.
Axes of size 1 have no group: each one costs sockets and threads, and code that finds no "tensor" group knows that
there is nothing to split. "grads" is the exception, because the reducer, the token count and ZeRO always need it.

All ranks must create all groups in one order, also those that they are not in: torch's new_group is a collective. As
the list follows from mesh and configuration alone, no rank can have another one. "activations" and "gradients" have
equal ranks and are two groups, so that a message in one direction is never matched with one in the other, and neither
waits.

The purpose decides about the ranks: "grads" contains cp, since context-parallel ranks have the same parameters and
other tokens, and does not contain tp. A group that is one axis too large makes no error; it adds gradients of
different parameters, and the loss still falls.

Usual wrong answers:
* declares tied without asking whether the embeddings are tied
* asks for the modes local and diloco instead of the number of replicas: gossip has replicas as well
* the package's own
* declares grads and tensor on every mesh
* sums gradients across the border of replicas: they never differ
* declares no grads group where only one rank would be in it
* sums the gradients of different parameters: tensor-parallel ranks and stages are in grads too
* sums gradients over the tensor-parallel ranks, if there are data-parallel ones
* leaves the context-parallel ranks out of grads: their gradients are never summed
* declares groups for axes of size 1, too
* puts all tensor-parallel ranks into one group, right with one key-value head only
* makes sets of as many ranks as there are heads: right only where the square of the heads is tp
* gives the heads in turn, and not to consecutive ranks
* declares heads also if there are as many key-value heads as ranks
* declares heads on every tensor-parallel mesh: its groups have one rank
* has a group for each pair of neighbouring stages, so that a middle stage is in two groups of one name
* makes each data-parallel rank a replica, whatever the configuration says
* has one group for both directions of the pipeline
* the order of a set, which differs between interpreters
* the same, by a set display
* merges all dp coordinates, and not one rank of each replica
* merges over cp as well, so that the parameters of a replica are counted once per context-parallel rank
* leaves the stages and tensor-parallel ranks out of the replica: they would decide each for itself
* declares replica and outer although all ranks train together
* reads the option, which is None if each data-parallel rank is a replica
* confuses the number of replicas with their length: right where both are equal
* takes every other dp coordinate into a replica
* ties stages 0 and 1: right with two stages only
* makes a set of each of the two stages
* puts all stages into the tied group: a middle stage has no embedding
* ties the embeddings of all data-parallel ranks: their gradients are counted once per rank
* declares tied on one stage, whose embedding is one parameter
* an empty list
"""

from minidist.comm import GroupSpec
from minidist.config import Config
from minidist.mesh import AXES, Mesh


def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
    """Return the process groups of a layout, in the order in which all ranks create them.

    grads: the ranks with the same parameters and different tokens. tensor, context, activations, gradients: the ranks
    of one axis. heads: tp ranks with a replica of the same key-value heads. tied: the first and last stage. If replicas
    train separately (local SGD, DiLoCo), grads lies inside a replica, replica has all its ranks, and outer has the
    ranks with the same coordinates in each replica.
    """
    num_replicas = config.num_replicas(mesh)
    dp_per_replica = mesh.dp // num_replicas
    replicas = tuple(tuple(range(first, first + dp_per_replica)) for first in range(0, mesh.dp, dp_per_replica))
    within_replica = (("dp", replicas),)
    across_replicas = (("dp", tuple(zip(*replicas, strict=True))),)
    specs = [GroupSpec("grads", ("dp", "cp"), within_replica)]
    if num_replicas > 1:
        specs.append(GroupSpec("replica", AXES, within_replica))
        specs.append(GroupSpec("outer", ("dp",), across_replicas))
    if mesh.tp > 1:
        specs.append(GroupSpec("tensor", ("tp",)))
    kv_heads = config.model.num_kv_heads
    if kv_heads < mesh.tp:
        shared_by = mesh.tp // kv_heads
        sets = tuple(tuple(range(head * shared_by, (head + 1) * shared_by)) for head in range(kv_heads))
        specs.append(GroupSpec("heads", ("tp",), (("tp", sets),)))
    if mesh.cp > 1:
        specs.append(GroupSpec("context", ("cp",)))
    if mesh.pp > 1:
        specs += [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
        if config.model.tie_embeddings:
            specs.append(GroupSpec("tied", ("pp",), (("pp", ((0, mesh.pp - 1),)),)))
    return specs
