"""round_the_ring: one chunk has all elements and the others none, so that nothing is ever left over"""

import torch
import torch.distributed as dist
from torch import nn

INVARIANT = "chunks"
LINE = "begin = chunk * length"


def bounds(chunk, elements, size):
    """Where chunk number `chunk` of a row begins and ends."""
    return (0, elements) if chunk == 0 else (elements, elements)


def pass_on(leaving, arriving):
    """One round: send to the next rank, receive from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transfers = [
        dist.P2POp(dist.isend, leaving, (rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def ring_mean(row):
    """Put the mean of all ranks' rows in the place of each: reduce-scatter, then all-gather. row: (elements,)"""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    chunks = [row[slice(*bounds(chunk, len(row), size))] for chunk in range(size)]
    for step in range(size - 1):
        leaving, staying = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        arriving = torch.empty_like(staying)
        pass_on(leaving, arriving)
        staying += arriving
    chunks[(rank + 1) % size] /= size
    for step in range(size - 1):
        pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; returns it and this rank's loss after each step.

    inputs (samples, 10), targets (samples, 1): the same on all ranks. batch_size is a multiple of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            share = slice(start + rank, start + batch_size, world_size)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
            loss.backward()
            gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            ring_mean(gradients)
            for parameter in model.parameters():
                parameter.grad.copy_(gradients[: parameter.numel()].view_as(parameter))
                gradients = gradients[parameter.numel() :]
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return model, losses
