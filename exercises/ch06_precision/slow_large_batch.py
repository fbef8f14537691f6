"""A large batch learns too little.

This program trains in bfloat16, in micro-batches of one sample. Its loss falls, but its results are wrong. Somebody
has compared the parameters after one epoch of 1,024 samples with those of a program that does the same in float32
throughout. Movement: norm of the change of all parameters, relative to float32:

    batch size   processes   learning rate   movement
            16           1            0.01       1.00
            16           4            0.01       1.00
           256           1            0.01       1.01
           512           1            0.01       0.88
           512           2            0.01       1.00
          1024           1            0.01       0.58
          1024           2            0.01       0.87
          1024           4            0.01       1.01
          1024           1            0.001      0.58

No value is infinite or NaN, all processes have equal parameters, and with 4 processes the loss is that of float32.
Run it: torchrun --standalone --nproc-per-node 1 THIS_FILE, and then with 4 processes

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the line that violates it, as its number in the original file or as its text. And the repaired program:
it sends each gradient once per step, in float32, and its gradient memory is independent of the number of micro-batches.

Check it with: python -m exercises check slow_large_batch

Stub 03bebaa9.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

INVARIANTS = {
    "start": "all replicas start with the same parameters",
    "range": "no gradient is too small for the dtype in which backward computes it",
    "count": "a loss is divided by the number of samples of the full batch, once, before backward",
    "sum": "gradients are accumulated in a dtype in which a small summand changes a large sum",
    "once": "a gradient is all-reduced once per step, after it has been accumulated over all micro-batches",
    "master": "the optimizer updates float32 master weights, which keep the digits that bfloat16 would round away",
}
INVARIANT = ""
LINE = ""


def main(inputs, targets, model, epochs=4, batch_size=256, lr=0.05):
    """Train `model` on all ranks, in micro-batches of one sample; return its master weights, in float32, and the sum of
    this rank's losses at each step.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. model: in float32; rank 0's parameters are used.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    for parameter in parameters:
        dist.broadcast(parameter.data, 0)
    masters = [parameter.detach().clone() for parameter in parameters]
    model.bfloat16()
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch_size):
            batch = range(start, min(start + batch_size, len(inputs)))
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            losses_of_step = []
            for sample in batch[rank::world_size]:
                error = model(inputs[sample].bfloat16()).float() - targets[sample]
                loss = error.square().sum() / len(batch)
                loss.backward()
                losses_of_step.append(loss.item())
                for total, parameter in zip(sums, parameters, strict=True):
                    total += parameter.grad
                    parameter.grad = None
            for total, master, parameter in zip(sums, masters, parameters, strict=True):
                dist.all_reduce(total)
                master -= lr * total
                parameter.data.copy_(master)
            losses.append(sum(losses_of_step))
    dist.destroy_process_group()
    return masters, losses


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.rand(1024, 10)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    trained, seen = main(samples, samples.sum(dim=1, keepdim=True), network, batch_size=1024, lr=0.01)
    if os.environ["RANK"] == "0":
        share = len(range(0, 1024, int(os.environ["WORLD_SIZE"]))) / 1024
        print(f"mean loss of rank 0's samples: {seen[0] / share:.3f} -> {seen[-1] / share:.3f}")
