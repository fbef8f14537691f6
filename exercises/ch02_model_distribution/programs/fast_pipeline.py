"""This program trains a network in two pipeline stages. Its loss falls, and the first loss is right in every digit, but
somebody has replaced AdamW by SGD and now gets other losses from the same 20 batches of 12 samples. Loss of the last
batch:

    stages   micro-batches   AdamW, lr 0.01   SGD, lr 0.1
         1               1           0.2837        0.3648
         2               1           0.2837        0.3648
         1               2           0.2837        0.3548
         2               2           0.2837        0.3548
         1               4           0.2837        0.3462
         2               4           0.2837        0.3462
         2              12           0.2837        0.3189

With SGD the loss depends on the number of micro-batches, which it must not. The program also prints the norm of the
first gradient. Run it: torchrun --standalone --nproc-per-node 2 THIS_FILE

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
every micro-batch must still pass through the stages in messages of its own, one forward and one backward.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "cut": "every layer belongs to exactly one stage",
    "order": "a stage sends gradients back in the order in which it received activations",
    "sum": "the optimizer takes a step after the gradients of all micro-batches have been accumulated, and not before",
    "mean": "a batch has one gradient however it is split: each micro-batch contributes its share of the mean loss",
    "norm": "the gradient norm covers the parameters of all stages",
}
INVARIANT = "mean"
LINE = "loss.backward()"


def receive_like(like, rank):
    """Receive a tensor with the shape of `like` from `rank`."""
    tensor = torch.empty_like(like)
    dist.recv(tensor, rank)
    return tensor


def forward(stage, micro_batch):
    """Run one micro-batch through this rank's stage; return its input and output, both shaped like it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage_input = (receive_like(micro_batch, rank - 1) if rank > 0 else micro_batch.clone()).requires_grad_()
    stage_output = stage(stage_input)
    if rank < last:
        dist.send(stage_output.detach(), rank + 1)
    return stage_input, stage_output


def backward(stage_input, stage_output, target, micro_batches):
    """Run backward of one micro-batch; return its part of the batch's loss on the last stage, 0 on the others."""
    rank, last, loss = dist.get_rank(), dist.get_world_size() - 1, torch.zeros(())
    if rank < last:
        stage_output.backward(receive_like(stage_output, rank + 1))
    else:
        loss = nn.functional.mse_loss(stage_output, target)
        (loss / micro_batches).backward()
    if rank > 0:
        dist.send(stage_input.grad, rank - 1)
    return loss.item() / micro_batches


def global_norm(stage):
    """Return the L2 norm of the gradients of all stages."""
    squares = torch.stack([parameter.grad.double().square().sum() for parameter in stage.parameters()]).sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def main(inputs, targets, layers, epochs=10, batch_size=12, micro_batches=4):
    """Train `layers`, split into one stage per rank. Return this rank's stage, and for every step the loss (0 except on
    the last rank) and the gradient norm.

    inputs (samples, 10), targets (samples, 10): equal on all ranks, as are the layers, each (n, 10) -> (n, 10).
    batch_size: a multiple of micro_batches.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = nn.Sequential(*layers[rank * len(layers) // size : (rank + 1) * len(layers) // size])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            batch = slice(start, start + batch_size)
            optimizer.zero_grad()
            in_flight = [forward(stage, micro_batch) for micro_batch in inputs[batch].chunk(micro_batches)]
            pairs = zip(in_flight, targets[batch].chunk(micro_batches), strict=True)
            losses.append(sum(backward(*activations, target, micro_batches) for activations, target in pairs))
            norms.append(global_norm(stage))
            optimizer.step()
    dist.destroy_process_group()
    return stage, losses, norms


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(5)] + [nn.Linear(10, 10)]
    _, losses, norms = main(samples, samples.flip(1).sin(), network)
    print(f"rank {os.environ['RANK']}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, first gradient norm {norms[0]:.4f}")
