"""A row that does not divide: the solution.

A chunk begins where the one before it ends, and those before it may be longer. With 241 elements on two ranks the
second chunk began at 120 instead of 121: element 120 belonged to both chunks, was added up twice and divided twice,
and element 240 belonged to none, so every rank kept its own. Two elements of 241 are wrong. The loss falls, because
the other 239 are right and Adam forgives the rest.

With 240 elements nothing is wrong, and with one rank neither, so a test of round numbers passes. Sizes that do not
divide are the first thing to try on anything that cuts. Whoever pads instead, as many systems do, has to get the same
thing right at the end of the row only.

Usual wrong answers:
* one chunk has all elements and the others none, so that nothing is ever left over
* the drift is hidden by giving all ranks the gradient of rank 0
* every rank computes whole batches by itself, and nothing needs to be sent
* whatever is wrong, it must be how the replicas started
* the sum is divided by every rank it comes by
* the last chunk takes one element of the rest, and there may be more
* the line is named as it is when mended, not as it was
* the fault is found and not mended
* rank 0 cuts as before
* right when one element is left over
* the line below cuts rightly what the one above began wrongly
* the library's sum in the place of the ring
* chunks that touch, and the rest of the row in none of them
* elements that are divided twice are taken for a mean that is taken twice
* whole rows go round, and each rank adds them up
* everything is named, and nothing is trained
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "neighbours": "every rank sends to the next one and receives from the one before it, in every round",
    "chunks": "the chunks of a row touch each other: every element belongs to exactly one of them",
    "added": "a chunk that is passed on holds the sum of all ranks it has come by",
    "mean": "a sum over ranks is divided by their number once, where it is complete",
}
INVARIANT = "chunks"
LINE = "begin = chunk * length"


def bounds(chunk, elements, size):
    """Where chunk number `chunk` of a row begins and ends; the first ones are an element longer if need be."""
    length, longer = divmod(elements, size)
    begin = chunk * length + min(chunk, longer)
    return begin, begin + length + (chunk < longer)


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


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    network, seen = main(samples, samples.sum(dim=1, keepdim=True).sin(), network)
    sums = [f"{parameter.sum().item():.6f}" for parameter in network.parameters()]
    print(f"rank {os.environ['RANK']}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, sums of the parameters {' '.join(sums)}")
