"""Collectives made of send and receive, each by the name of its algorithm.

Every transfer goes through the door, so the meter counts it and the board shows it, and each function has the
arguments of the door's operation of that name. They run on any backend that can send: rounds of transfers that are
started together, which no order can deadlock. Any number of ranks, any number of elements, any dtype.

    ALGORITHMS["all_reduce"]["ring"](tensor, group, "mean")

They are synchronous. `Chosen` gives an all-reduce the asynchronous form that gradients need.
"""

from collections.abc import Callable, Mapping

from minidist.comm.algorithms import direct, halving, ring, root
from minidist.comm.algorithms.chosen import Chosen
from minidist.comm.algorithms.hierarchical import hierarchical_all_reduce
from minidist.comm.algorithms.root import central_update

# By operation, then by algorithm: the names of the convention table.
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

__all__ = ["ALGORITHMS", "Chosen", "central_update", "hierarchical_all_reduce"]
