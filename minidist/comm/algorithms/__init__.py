"""Collective algorithms built on send and receive, by operation and name.

    ALGORITHMS["all_reduce"]["ring"](tensor, group, "mean")

Each function takes the arguments of the operation of that name in `collectives` and is synchronous; a reduce, which is
not there, takes (tensor, dst, group, op). Reductions can also take a "mean". `DeferredAllReduce` gives an all-reduce
the asynchronous form that gradients need. Every transfer goes through `collectives`, so the meter counts it. They run
on any backend, number of ranks, number of elements and dtype.

Read `primitives`, then `root` (flat and tree), `direct`, `ring`, `halving`; `deferred` last.
"""

from collections.abc import Callable, Mapping

from minidist.comm.algorithms import direct, halving, ring, root
from minidist.comm.algorithms.deferred import DeferredAllReduce
from minidist.comm.algorithms.ring import hierarchical_all_reduce
from minidist.comm.algorithms.root import parameter_server_step

# By operation, then by algorithm: the names in `tools.network.algorithm_bytes.IMPLEMENTED_ALGORITHMS`.
ALGORITHMS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "broadcast": {"flat": root.flat_broadcast, "tree": root.tree_broadcast},
    "reduce": {"flat": root.flat_reduce, "tree": root.tree_reduce},
    "all_gather": {"ring": ring.all_gather, "doubling": halving.all_gather},
    "reduce_scatter": {"ring": ring.reduce_scatter, "halving": halving.reduce_scatter},
    "all_reduce": {
        "naive": direct.naive_all_reduce,
        "tree": direct.tree_all_reduce,
        "ring": ring.all_reduce,
        "doubling": halving.doubling_all_reduce,
        "rabenseifner": halving.rabenseifner_all_reduce,
    },
    "all_to_all": {"pairwise": direct.pairwise_all_to_all},
}

__all__ = ["ALGORITHMS", "DeferredAllReduce", "hierarchical_all_reduce", "parameter_server_step"]
