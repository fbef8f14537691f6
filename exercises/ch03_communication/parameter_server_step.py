"""Parameter-server step.

Warm-up. Write one training step with a parameter server: group rank `root` reduces the gradients of all ranks, updates
its parameters, and sends them to all ranks.

parameters, gradient: contiguous tensors of one shape; ranks may start with different parameters. update(parameters,
gradient) changes `parameters` in place. op: "sum", "mean", "max", "min" or "product".
Example: 3 ranks, root 1, and update is lambda theta, grad: theta.sub_(0.1 * grad).
    rank 0 has the parameters [10.0] and the gradient [1.0], rank 1 [20.0] and [2.0], rank 2 [30.0] and [3.0]
    The root updates [20.0] with the gradient [6.0]; then all ranks have the parameters [19.4]; with op "mean" [19.8].

Checked: the parameters of all ranks for every root and op; that `update` is called once, on the root; that the other
ranks' gradients do not change; and that each of them sends one gradient and receives the parameters once.

You may call:
    flat_reduce(tensor, dst, group, op)   overwrites `tensor` on group rank `dst` with the reduction, no other
    flat_broadcast(tensor, src, group)   overwrites `tensor` on every rank with that of group rank `src`
    group.rank   this rank's index in the group; dst, src and root are such indices

Check it with: python -m exercises check parameter_server_step

Stub 77e90e73.
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
    raise NotImplementedError("reduce the gradients to the root, update there, broadcast the parameters")
