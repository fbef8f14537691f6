"""This program stops after some steps and is resumed by new processes. Its loss goes on falling, but the resumed run is
another run. The same 24 samples, batch size 4, on 2 ranks, once without a stop and once stopped after step 8:

    step                                8        9       10       11       12       13
    loss, not stopped              0.0605   0.0630   0.0414   0.0453   0.0397   0.0169
    loss, stopped after step 8     0.0605   0.0721   0.0661   0.0258   0.0397   0.0090
    greatest difference of the parameters before step 9: 0; of both moments: 0; of the learning rate: 0

Run it: torchrun --standalone --nproc-per-node 2 THIS_FILE

This debugging exercise asks for three answers. INVARIANT: the key of the one rule in INVARIANTS that the program
violates. LINE: the faulty line, by its number in the unchanged stub (int) or its text (str). And the repaired program:
a resumed run has the parameters and losses of the run without a stop, which is right and must stay as it is.
"""

import json
import os

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn

INVARIANTS = {
    "start": "the resumed run starts with the parameters that were saved, on all ranks",
    "moments": "the optimizer goes on with the moments and the step count that were saved",
    "rate": "the learning rate is a function of the number of the step, whatever process computes it",
    "order": "the resumed run sees the samples that the run without a stop would see next, in the same order",
    "sum": "the gradient is the mean over the samples of the global batch, whatever the number of ranks",
}
INVARIANT = "order"
LINE = "generator = torch.Generator().manual_seed(seed + (step - first) // per_epoch)"


def main(inputs, targets, model, steps, checkpoint=None, batch_size=4, seed=3):
    """Train `model` until `steps` steps are done, from the start or from a checkpoint; return a checkpoint, in bytes,
    and the loss of the global batch at each step of this call.

    inputs (samples, 10), targets (samples, 1): equal on all ranks. model: without a checkpoint, rank 0's parameters are
    used.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=0.0, eps=1e-3, foreach=False)
    first = 0
    if checkpoint is None:
        for parameter in parameters.values():
            dist.broadcast(parameter.data, 0)
    else:
        first = restore(checkpoint, parameters, optimizer)
    losses = []
    for step, batch in batches(len(inputs), batch_size, seed, first, steps):
        mine = batch[rank::world_size]
        errors = model(inputs[mine]) - targets[mine]
        loss = errors.square().sum() / len(batch)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        total = loss.detach().clone()
        for tensor in (total, *gradients):
            dist.all_reduce(tensor)
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (step + 1) / 4)
        optimizer.step()
        losses.append(total.item())
    dist.destroy_process_group()
    return snapshot(steps, parameters, optimizer), losses


def batches(num_samples, batch_size, seed, first, steps):
    """Yield the steps from `first` to `steps`, each with the samples of its global batch.

    Each epoch is a new permutation of all samples, of which those that fill no batch are left out.
    """
    per_epoch = num_samples // batch_size
    for step in range(first, steps):
        place = step % per_epoch
        if step == first or place == 0:
            generator = torch.Generator().manual_seed(seed + step // per_epoch)
            order = torch.randperm(num_samples, generator=generator).tolist()
        yield step, order[place * batch_size : (place + 1) * batch_size]


def snapshot(step, parameters, optimizer):
    """Return the parameters, the optimizer states and the number of the step, as bytes."""
    tensors = {f"parameter/{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}/{name}"] = value
    return save(tensors, metadata={"state": json.dumps({"step": step})})


def restore(checkpoint, parameters, optimizer):
    """Set the parameters and optimizer states to those of a checkpoint; return the number of its step."""
    header = int.from_bytes(checkpoint[:8], "little")
    state = json.loads(json.loads(checkpoint[8 : 8 + header])["__metadata__"]["state"])
    for stored, value in load(checkpoint).items():
        kind, name = stored.split("/", 1)
        if kind == "parameter":
            parameters[name].data.copy_(value)
        else:
            optimizer.state[parameters[name]][kind] = value
    return state["step"]


if __name__ == "__main__":
    values = torch.rand(24, 10, generator=torch.Generator().manual_seed(1))
    goals = values.square().mean(dim=1, keepdim=True)
    runs = {}
    for stop in (None, 8):
        torch.manual_seed(0)
        network, saved, seen = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)), None, []
        for until in (stop, 16):
            if until is not None:
                saved, more = main(values, goals, network, until, saved)
                seen += more
        runs[stop] = seen
    if os.environ["RANK"] == "0":
        print("loss, not stopped:         ", *(f"{loss:.4f}" for loss in runs[None][7:13]))
        print("loss, stopped after step 8:", *(f"{loss:.4f}" for loss in runs[8][7:13]))
