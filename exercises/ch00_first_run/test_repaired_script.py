"""Tests of repaired_script: the reference trains on one process by formulas of its own, in float64."""

import inspect
import math
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from exercises.testing import Wrong, expect, test

SHAPES = ((20, 10), (20,), (1, 20), (1,))
EVEN, UNEVEN = (12, 6), (9, 4)  # samples, batch size; 6 divides by 1, 2 and 3 ranks, the last batch of 9 has 1
TOLERANCE = 1e-9  # float64 sums in another order


class Samples:
    """A data set that counts how often each sample was read."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 10, generator=generator, dtype=torch.float64)
        self.targets = self.inputs.sum(dim=1, keepdim=True).sin()
        self.reads = [0] * count

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        inputs, targets = self.inputs[index], self.targets[index]  # raises IndexError past the end, as a list does
        self.reads[index] += 1
        return inputs, targets

    def __repr__(self):
        return f"{len(self)} samples"


def start(seed):
    """Initial parameters, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in SHAPES]


def model_of(answer, seed):
    """The learner's network with parameters of ours."""
    model = answer.Network().double()
    parameters = list(model.parameters())
    expect("the shapes of the network's parameters", [list(p.shape) for p in parameters], [list(s) for s in SHAPES])
    with torch.no_grad():
        for parameter, value in zip(parameters, start(seed), strict=True):
            parameter.copy_(value)
    return model


def one_process(data, epochs, batch_size):
    """The parameters that a single process has after training from start(0)."""
    parameters = [value.requires_grad_() for value in start(0)]
    for _ in range(epochs):
        for first in range(0, len(data), batch_size):
            w1, b1, w2, b2 = parameters
            inputs, targets = data.inputs[first : first + batch_size], data.targets[first : first + batch_size]
            loss = ((torch.relu(inputs @ w1.T + b1) @ w2.T + b2 - targets) ** 2).mean()
            gradients = torch.autograd.grad(loss, parameters)
            parameters = [(p - 0.01 * g).detach().requires_grad_() for p, g in zip(parameters, gradients, strict=True)]
    return [parameter.tolist() for parameter in parameters]


def trained(answer, run, sizes, epochs, seed=0):
    """(the data set that main was given, the parameters it returned)."""
    data = Samples(sizes[0])
    model = run(answer.main, data, model_of(answer, seed), epochs=epochs, batch_size=sizes[1])
    if not isinstance(model, torch.nn.Module):
        raise Wrong("type", "main must return the trained model", "a Network", type(model).__name__)
    return data, [parameter.detach().tolist() for parameter in model.parameters()]


def told(sizes, epochs):
    """A case in words."""
    return f"{sizes[0]} samples, batches of {sizes[1]}, {epochs} epoch{'s' * (epochs > 1)}"


@test(points=3, ranks=(1, 2))
def starts_where_torchrun_says(answer, run):
    """main joins as the rank that torchrun made it, over a backend that this machine has, and comes to its end."""
    trained(answer, run, EVEN, 1)
    expect("whether main has called init_process_group", run.joined, True)


@test(points=2, ranks=(2,))
def computes_where_it_can(answer, world, run):
    """A GPU of its own and nccl for each rank where there are enough, else the CPU and gloo; main asks for it."""
    for gpus, local_rank, local_size in ((0, 1, 2), (1, 1, 2), (2, 1, 2), (8, 5, 8)):
        enough = gpus >= local_size
        available = mock.patch("torch.cuda.is_available", lambda gpus=gpus: gpus > 0)
        with available, mock.patch("torch.cuda.device_count", lambda gpus=gpus: gpus):
            got = answer.device_and_backend(local_rank, local_size)
        wanted = (f"cuda:{local_rank}", "nccl") if enough else ("cpu", "gloo")
        if not isinstance(got, tuple) or len(got) != 2:
            raise Wrong("type", "device_and_backend must return two things", "a device and a backend", repr(got))
        expect(f"device and backend with {gpus} GPUs", [str(got[0]), got[1]], list(wanted))
    asked = []
    names = inspect.unwrap(answer.main).__globals__

    def chosen(*args):
        asked.append(args)
        return torch.device("cpu"), "gloo"

    with mock.patch.dict(names, device_and_backend=chosen):
        trained(answer, run, EVEN, 1)
    expect("what main gives to device_and_backend", asked[:1], [(world.rank, world.size)], case="main(...)")


@test(points=4, ranks=(1, 2, 3))
def each_sample_once_per_epoch(answer, world, run):
    """Over all ranks every sample is read once per epoch, and no rank does the work of others."""
    for sizes, epochs in ((EVEN, 1), (UNEVEN, 2)):
        case = told(sizes, epochs)
        data, _ = trained(answer, run, sizes, epochs)
        reads = run.gather(data.reads)
        total = [sum(each) for each in zip(*reads, strict=True)]
        expect("how often each sample was read by all ranks together", total, [epochs] * sizes[0], case=case)
        most = epochs * math.ceil(sizes[0] / sizes[1]) * math.ceil(sizes[1] / world.size)
        by_rank = [sum(each) for each in reads]
        expect(
            f"samples read by each rank, {most} at most", by_rank, [min(count, most) for count in by_rank], case=case
        )


@test(points=3, ranks=(1, 2))
def equals_one_process(answer, run):
    """From equal starts, the parameters on every rank are those of one process."""
    data, parameters = trained(answer, run, EVEN, 2)
    expect("the parameters", parameters, one_process(data, 2, EVEN[1]), tolerance=TOLERANCE, case=told(EVEN, 2))


@test(points=3, ranks=(2, 3))
def equals_one_process_in_uneven_batches(answer, run):
    """So they are when a batch does not divide by the number of ranks, or has fewer samples than there are ranks."""
    data, parameters = trained(answer, run, UNEVEN, 1)
    expect("the parameters", parameters, one_process(data, 1, UNEVEN[1]), tolerance=TOLERANCE, case=told(UNEVEN, 1))


@test(points=2, ranks=(3,))
def replicas_start_as_rank_0(answer, world, run):
    """Replicas that were made with other values on every rank start as the one of rank 0."""
    data, parameters = trained(answer, run, EVEN, 1, seed=world.rank)
    expect("the parameters", parameters, one_process(data, 1, EVEN[1]), tolerance=TOLERANCE, case="unequal replicas")


@test(points=2, ranks=(2,))
def one_step_per_batch(answer, run):
    """The optimizer takes one step for each batch of each epoch."""
    steps = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    trained(answer, run, UNEVEN, 1)
    hook.remove()
    expect("steps of the optimizer", len(steps), math.ceil(UNEVEN[0] / UNEVEN[1]), case=told(UNEVEN, 1))


@test(points=1, ranks=(1,))
def ends_its_group(answer, run):
    """When main returns, the process group is ended."""
    trained(answer, run, EVEN, 1)
    expect("whether the process group was ended", run.ended, True, case="main(...)")
