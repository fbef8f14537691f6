"""Central update on one root: the solution, as it stands in minidist.comm.algorithms.root.

The rule theta <- theta - lr * sum_i grad_i does not say which rank computes it. With a central update only the root
needs the optimizer states, and the ranks may even start with different parameters, because each receives the result.
The price is the root's link: size - 1 gradients come in and size - 1 copies of the parameters go out through it,
while all other links are idle.

Usual wrong answers:
* a mean is not divided
* the package's own update
* the same parameters in every step
* every rank needs the optimizer's state
* the sum travels too, and replaces each rank's gradient
* only the root has the new parameters
* the third rank keeps its own parameters
* the root updates before it has collected
* always rank 0
* two half steps, whose state counts two
* zeros on all ranks
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
    flat_reduce(gradient, root, group, op)
    if group.rank == root:
        update(parameters, gradient)
    flat_broadcast(parameters, root, group)
