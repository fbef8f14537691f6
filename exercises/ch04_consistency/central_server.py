"""A central server, and a server per shard.

Write two training steps. In central_step the workers send their gradients to one server, which updates the parameters
and sends them back to the workers. In sharded_step every rank is the server of one shard of the parameters, so that
no link carries more bytes than another. Each rank sends its gradient to the servers themselves: no rank sends partial
sums, as in a ring.

parameters, gradient: flat tensors of equal shape. update(parameters, gradient) is the optimizer: it changes the
parameters in place, and it has states. group.rank is this rank's number in the group, group.size the number of ranks.
Example: 3 ranks, gradients [1, 2], [3, 4] and [5, 6], server 0. Rank 0 calls update(parameters, [9, 12]) once, and
sends the new parameters to ranks 1 and 2. With 7 elements on 3 ranks, sharded_step assigns elements 0 to 2 to rank 0,
3 and 4 to rank 1, 5 and 6 to rank 2; with 2 elements on 4 ranks, the shards of ranks 2 and 3 are empty. Every rank
calls update once, also for an empty shard; you may send empty shards or leave them out.

Checked: the parameters after two steps of an optimizer with momentum, on 1 to 4 ranks, with each rank as the server,
also for sizes that the number of ranks does not divide; which ranks call update, and with which arguments; every
message, its size and its peer; and that this rank's gradient has not changed.

You may call:
    send(tensor, to_rank, group), recv(tensor, from_rank, group)   wait for each other; recv fills the tensor
    P2POp("send" or "recv", tensor, rank), batch_send_recv(list of P2POp, group)   all at once, in any order
    Tensor.tensor_split(n) -> n views; the first ones are longer by 1 if n does not divide the size
    Tensor.clone(), torch.empty_like(tensor)

Check it with: python -m exercises check central_server

Stub 957e2492.
"""

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv, recv, send
from minidist.simple.consistency import Update


def sharded_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group) -> None:
    """Collective: sum each shard of the gradients on its server, update it there, and send it to all ranks.

    parameters, gradient: flat tensors; equal parameters on all ranks. Rank r is the server of shard r: both tensors are
    divided into consecutive shards, of which the first `len(parameters) % group.size` have one element more than the
    others. gradient: w_i * grad L of this rank. update: called once on every rank, with its shards of the parameters
    and of the summed gradient.
    """
    raise NotImplementedError("every rank is the server of its own shard")


def central_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group, server: int) -> None:
    """Collective: sum all gradients on the server, update the parameters there, and send them to all ranks.

    gradient: this rank's, already times its weight, (n,) as `parameters`. server: a group rank, the only one with
    optimizer states; update(parameters, summed gradient) is called there. `parameters` is overwritten on all ranks.
    """
    raise NotImplementedError("gradients to the server, update there, parameters to all ranks")
