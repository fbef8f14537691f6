"""A loss that falls on every rank: the solution.

An optimizer step reads the parameters and the gradients. The replicas stay equal if both are equal on all ranks. The
parameters were made equal once, at the start, so only the gradients have to be communicated.

The hook averages the parameters. This pulls the replicas together before each step, and then each rank applies the
gradient of its own samples and drifts away again. The loss falls because every replica learns. A widely used program
had this fault, and no test noticed: a falling loss proves nothing. Compare the parameters across the ranks, and the
losses with one process.

Usual wrong answers:
* averages the parameters after the step, which is right only for plain SGD
* every rank processes the full batch, so that no gradient is sent
* also averages the parameters, for no purpose
* repairs the hook, and broadcasts the parameters once more after training
* broadcasts the replica of rank 0 at the end, which hides the drift
* names the initial parameters as the cause
* every rank trains on the whole batch
* averages over at most three ranks
* gives LINE as in the repaired program, not as in the original
* names the fault and does not fix it
* removes the faulty line, and does not average the gradients
* repairs the hook, and returns the loss of the last step of each epoch only
* names the line of the broadcast from rank 0
* rank 0 skips the collective, and the other ranks wait for it
* all ranks apply the gradient of rank 0, and the samples of the others are lost
* sums the gradients instead of averaging them
* takes the different losses for shards of different sizes
* names everything right, and does not train
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "share": "every sample of a batch belongs to exactly one rank",
    "mean": "all shards have the same size, so the mean of the per-rank mean losses is the mean loss of the batch",
    "gradient": "every replica applies the same gradient, the mean over all ranks",
    "steps": "every rank takes the same number of steps",
}
INVARIANT = "gradient"
LINE = "mean_over_ranks(parameter.data)"


def mean_over_ranks(tensor):
    """Replace each rank's tensor by the mean over all ranks, in place."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def on_gradient(parameter):
    """Hook that autograd calls when the gradient of a parameter is complete."""
    mean_over_ranks(parameter.grad)


def main(inputs, targets, model, epochs=10, batch_size=12):
    """Train `model` on all ranks; return it and this rank's loss at each step.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. batch_size: a multiple of the number of ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.register_post_accumulate_grad_hook(on_gradient)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.001)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            share = slice(start + rank, start + batch_size, world_size)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[share]), targets[share])
            loss.backward()
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
