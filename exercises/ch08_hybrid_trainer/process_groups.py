"""The process groups of a mesh.

Until now each chapter had one process group. With several axes on one mesh, a rank is in up to nine, one per purpose.
Declare all of them as a list of GroupSpec, from which `bind` then makes the groups, on all ranks in one order.

mesh: its sizes are mesh.pp, mesh.dp, mesh.cp and mesh.tp; tp changes fastest with the rank, then cp, dp and pp. A
GroupSpec(name, axes, axis_partitions) puts ranks into one group whose coordinates differ on `axes` only. The optional
axis_partitions splits these groups further: ((axis, sets), ...), where `sets` are tuples of coordinates on this axis;
ranks are in one group if their coordinates are in one set, and a rank whose coordinate is in no set is in no group.
With tp 4, GroupSpec("pairs", ("tp",), (("tp", ((0, 1), (2, 3))),)) has two groups of two ranks on each tp axis.

    "grads"                      on every mesh: the ranks that differ in dp or cp, inside one replica
    "tensor", "context"          the ranks that differ in tp, or in cp, if this axis has more than one rank
    "heads"                      with fewer key-value heads than tp ranks: the consecutive tp ranks that share one head
    "activations", "gradients"   the ranks that differ in pp, if there are several stages
    "tied"                       with several stages and tied embeddings: of these ranks, only first and last stage
    "replica", "outer"           only if config.num_replicas(mesh) is above 1: all ranks of one replica, and
                                 the ranks with one position in each of the replicas

Replicas that train separately (local SGD, DiLoCo) divide the dp axis into consecutive coordinates: with dp 4 and 2
replicas, 0 and 1 are the first replica and 2 and 3 the second one. Only "outer" crosses their border.

Example: Mesh(dp=4, tp=2) has the ranks 0 to 7, rank = 2 * dp + tp. If all replicas train together, "grads" has the
groups (0, 2, 4, 6) and (1, 3, 5, 7). With two replicas that train separately:
    "grads"     (0, 2), (1, 3), (4, 6), (5, 7)      "replica"   (0, 1, 2, 3), (4, 5, 6, 7)
    "outer"     (0, 4), (1, 5), (2, 6), (3, 7)      "tensor"    (0, 1), (2, 3), (4, 5), (6, 7)
If there is one key-value head, "heads" has the groups of "tensor".

The order of the list is yours; as ranks create the groups in this order, it must be the same on all of them.

Checked: the names of the specs, and all groups of each, each group once, in an order that is the same on all ranks: on
meshes of 1 to 81 ranks with one to four axes; with 1 to 24 key-value heads; with tied embeddings on 1 to 4 stages; and
with local SGD and DiLoCo of 1 to 4 replicas. The result must be a list.

You may call:
    GroupSpec(name: str, axes: tuple of axis names, axis_partitions=())   AXES is ("pp", "dp", "cp", "tp")
    config.num_replicas(mesh) -> int   of replicas that train separately; 1 if all ranks train together
    config.model.num_kv_heads -> int, a divisor or a multiple of mesh.tp; config.model.tie_embeddings -> bool

Check it with: python -m exercises check process_groups

Stub f6701537.
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
    raise NotImplementedError("return the specs of all process groups that this layout needs")
