"""Parameter-server step: the solution, as it stands in minidist.comm.algorithms.root.

The rule theta <- theta - lr * sum_i grad_i does not say which rank computes it. With a parameter server only the root
needs the optimizer states, and the ranks may even start with different parameters, because each receives the result.
The price is the root's link: size - 1 gradients come in and size - 1 copies of the parameters go out through it,
while all other links are idle.

Usual wrong answers:
* a mean is not divided by the number of ranks
* the package's own update
* the same parameters in every step
* every rank updates, and so needs optimizer states
* broadcasts the sum as well, which replaces each rank's gradient
* reduces the gradients in float32, whatever their dtype
* only the root has the new parameters
* the third rank keeps its own parameters
* the root updates before it has received the gradients
* takes `root` for a rank of the world; in a group that does not begin at 0 no rank updates, or another one
* reduces along a tree, which leaves partial sums in the gradients of other ranks
* the root is always rank 0
* two updates by half, so that the optimizer counts two steps
* zeros on all ranks
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
    root: group rank. op: the reduction of the gradients. `gradient` may change on the root, and does not elsewhere.
    Only the root needs optimizer states, but all bytes of a step pass through its one link. This is the
    parameter server of Li et al. 2014 with a single server.
    """
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
