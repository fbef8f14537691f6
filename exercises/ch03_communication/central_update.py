"""Central update on one root.

Write the missing lines of central_update; its docstring specifies the result.
You may call: flat_reduce, flat_broadcast, tree_reduce, tree_broadcast, exchange, update.
Check it with: python -m exercises check central_update

Stub 0f8fa530.
"""

from collections.abc import Callable

from torch import Tensor

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce
from minidist.comm.group import Group


def central_update(
    parameters: Tensor,
    gradient: Tensor,
    update: Callable[[Tensor, Tensor], None],
    group: Group,
    root: int = 0,
    op: str = "sum",
) -> None:
    """Reduce the gradients to one root, update the parameters there, and broadcast them.

    update: called on the root only, with its `parameters` and the reduced `gradient`; changes the parameters in place.
    Only the root needs optimizer state; in return all bytes of a step pass through its one link. This is the parameter
    server of Li et al. 2014 with a single server. `gradient` is reduced in place on the root, unchanged elsewhere.
    """
    raise NotImplementedError("reduce the gradients to the root, update there, broadcast the parameters")
