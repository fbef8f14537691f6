"""A large batch learns too little: the solution.

bfloat16 has eight significant bits: its numbers above 1 are 1/128 apart, so adding less than 1/256 to 1 gives 1.
After 256 summands of equal size the sum stops growing, and the update is too small; the error grows with the number
of micro-batches. No element is zero, no value is infinite, and the loss falls: with a smaller gradient it falls more
slowly.

The accumulator was allocated with the dtype of the parameter. A float32 accumulator takes two more bytes per
parameter, whatever the number of micro-batches, and adds 2**16 summands of equal size without loss. The same holds
for the sum over ranks. Float32 master weights do not help here: a gradient that is missing in the sum never reaches
them.

Usual wrong answers:
* makes micro-batches eight times as large, so that less is lost
* names the start of the replicas as the invariant
* keeps the gradients of all micro-batches and sums them at the end
* only the first parameter's sum is float32
* float16 has three more bits, and loses smaller addends
* accumulates in .grad, which is bfloat16
* compensates with a larger learning rate
* mistakes them for updates that are lost because there are no masters
* initializes the masters from rounded parameters
* names the repaired line instead of the original one
* names the fault but does not repair it
* keeps the model in float32, which avoids the fault but not the cost of float32
* repaired, but without the broadcast: right only if the replicas start equal
* only rank 0 accumulates in float32
* names the line that adds; the dtype is chosen where the sum is allocated
* mistakes lost additions for gradients that underflow
* repaired, but omits the remainder of a batch that is not divisible by the number of ranks
* adds in float32, and rounds to bfloat16 each time
* sends the gradients of every micro-batch
* accumulates in float32, but sends bfloat16
* mistakes small updates for losses that are divided too often
* converts the sum to float32 only after all micro-batches were added
* names everything, and trains nothing
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
INVARIANT = "sum"
LINE = "sums = [torch.zeros_like(parameter) for parameter in parameters]"


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
            sums = [torch.zeros_like(master) for master in masters]
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
