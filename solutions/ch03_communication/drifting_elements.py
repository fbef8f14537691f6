"""Replicas that drift apart: the solution.

A chunk begins where the previous one ends, and previous chunks may be longer. With 241 elements on two ranks the
second chunk began at 120 instead of 121. Element 240 belonged to no chunk, so each rank kept its local value: one of
241 elements is wrong. Element 120 belonged to both chunks and was summed on both ranks, which is right by luck. With
three ranks element 80 is in two of three chunks: it is summed and divided twice, so two elements are wrong. Where two
chunks overlap, a rank may receive into an element while it sends it: that is why some counts vary. The loss falls,
because the others are right and Adam tolerates the rest.

With 240 elements or with one rank the result is right, so a test with round numbers passes. Test any code that splits
tensors with sizes that are not divisible. Many systems pad instead; they have to handle only the end of the tensor.

Usual wrong answers:
* one chunk has all elements and the others none, so there is never a remainder
* hides the difference by broadcasting the gradient of rank 0
* every rank computes the full batches by itself and sends nothing
* names the start of the replicas as the invariant
* every rank that the sum passes divides it
* the last chunk takes one element of the remainder, which may be larger
* names the repaired line instead of the original one
* names the fault but does not repair it
* rank 0 computes the bounds as before
* right only for a remainder of one
* changes the next line to compensate for the wrong begin
* the library's all-reduce instead of the ring
* the chunks are adjacent, but the remainder is in none of them
* returns the loss summed over the own samples, and not their mean
* mistakes elements that are divided twice for a mean that is computed twice
* sends the full flat gradient in every round, and each rank adds it
* names everything, and trains nothing
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "neighbours": "in every round each rank sends to the next rank and receives from the previous one",
    "chunks": "the chunks of a tensor are adjacent: every element belongs to exactly one of them",
    "added": "a chunk that a rank sends on holds the sum over all ranks that it has passed",
    "mean": "a complete sum over the ranks is divided by their number exactly once",
    "gathered": "in the second half each rank sends first the chunk that it has completed, then what has arrived",
    "samples": "each sample of a batch belongs to exactly one rank",
    "places": "each parameter gets the gradient from its own place in the flat gradient",
}
INVARIANT = "chunks"
LINE = "begin = chunk * length"


def bounds(chunk, elements, size):
    """Return begin and end of chunk number `chunk` of `size`."""
    length, longer = divmod(elements, size)
    begin = chunk * length + min(chunk, longer)
    return begin, begin + length + (chunk < longer)


def pass_on(leaving, arriving):
    """Run one round: send to the next rank, receive from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transfers = [
        dist.P2POp(dist.isend, leaving, (rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def ring_mean(flat):
    """Replace `flat` (elements,) on every rank by the mean over the ranks: reduce-scatter, then all-gather."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    chunks = [flat[slice(*bounds(chunk, len(flat), size))] for chunk in range(size)]
    for step in range(size - 1):
        leaving, staying = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        arriving = torch.empty_like(staying)
        pass_on(leaving, arriving)
        staying += arriving
    chunks[(rank + 1) % size] /= size
    for step in range(size - 1):
        pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; return it and this rank's loss at each step.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. batch_size: a multiple of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            own_samples = slice(start + rank, start + batch_size, world_size)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[own_samples]), targets[own_samples])
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
