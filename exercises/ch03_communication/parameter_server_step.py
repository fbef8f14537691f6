"""Parameter-server step.

Write the missing lines of parameter_server_step; its docstring specifies the result.
You may call: flat_reduce, flat_broadcast, tree_reduce, tree_broadcast, exchange, update.
Check it with: python -m exercises check parameter_server_step

Stub 3569ce2c.
"""

from collections.abc import Callable

from torch import Tensor

from minidist.comm.algorithms.root import flat_broadcast, flat_reduce
from minidist.comm.group import Group


def parameter_server_step(
    parameters: Tensor,
    gradient: Tensor,
    update: Callable[[Tensor, Tensor], None],
    group: Group,
    root: int = 0,
    op: str = "sum",
) -> None:
    """Collective: reduce the gradients to rank `root`, update the parameters there, and broadcast them to all ranks.

    update: called on the root only, with its `parameters` and the reduced `gradient`; changes the parameters in place.
    root: group rank. op: the reduction of the gradients. `gradient` is reduced in place on the root, unchanged
    elsewhere. Only the root needs optimizer states, but all bytes of a step pass through its one link. This is the
    parameter server of Li et al. 2014 with a single server.
    """
    raise NotImplementedError("reduce the gradients to the root, update there, broadcast the parameters")
