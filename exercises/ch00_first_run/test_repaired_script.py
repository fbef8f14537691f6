"""Tests of repaired_script: the reference trains on one process by formulas of its own, in float64."""

import inspect
import linecache
import math
import runpy
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from exercises.observed import Moved
from exercises.testing import Wrong, expect, test

SHAPES = ((20, 10), (20,), (1, 20), (1,))
EVEN, UNEVEN = (16, 8), (11, 5)  # samples, batch size; 8 divides by 1, 2 and 4 ranks, the last batch of 11 has 1
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


def one_process(sizes, epochs, seed=0):
    """The parameters that a single process has after training from start(seed)."""
    data, batch_size = Samples(sizes[0]), sizes[1]
    parameters = [value.requires_grad_() for value in start(seed)]
    for _ in range(epochs):
        for first in range(0, len(data), batch_size):
            w1, b1, w2, b2 = parameters
            inputs, targets = data.inputs[first : first + batch_size], data.targets[first : first + batch_size]
            loss = ((torch.relu(inputs @ w1.T + b1) @ w2.T + b2 - targets) ** 2).mean()
            gradients = torch.autograd.grad(loss, parameters)
            parameters = [(p - 0.01 * g).detach().requires_grad_() for p, g in zip(parameters, gradients, strict=True)]
    return [parameter.tolist() for parameter in parameters]


class Run(NamedTuple):
    """What one call of main has left: how often each sample was read, and the parameters it returned.

    sent: bytes, by this rank.
    """

    reads: list
    parameters: list
    steps: int
    sent: int
    joined: bool
    ended: bool


RUNS = {}  # several tests look at one and the same run


def trained(answer, run, sizes, epochs, seed=0):
    """The run of main over so many samples, in batches of that size, from start(seed)."""
    if (sizes, epochs, seed) not in RUNS:
        steps, data = [], Samples(sizes[0])
        hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
        model = run(answer.main, data, model_of(answer, seed), epochs=epochs, batch_size=sizes[1])
        hook.remove()
        if not isinstance(model, torch.nn.Module):
            raise Wrong("type", "main must return the trained model", "a Network", type(model).__name__)
        parameters = [parameter.detach().tolist() for parameter in model.parameters()]
        sent = sum(record.wire_bytes for record in run.records)
        RUNS[sizes, epochs, seed] = Run(data.reads, parameters, len(steps), sent, run.joined, run.ended)
    return RUNS[sizes, epochs, seed]


def told(sizes, epochs):
    """A case in words."""
    return f"{sizes[0]} samples, batches of {sizes[1]}, {epochs} epoch{'s' * (epochs > 1)}"


@test(points=2, ranks=(1, 2))
def starts_where_torchrun_says(answer, run):
    """main joins as the rank that torchrun made it, over a backend that this machine has, and comes to its end."""
    expect("whether your file trains already when it is imported", run.joined, False, case="import")
    result = trained(answer, run, EVEN, 1)
    expect("whether main has called init_process_group", result.joined, True, case="main(...)")


@test(points=1)
def computes_where_it_can(answer):
    """A GPU of its own and nccl for each rank where there are enough, else the CPU and gloo."""
    for gpus, local_rank, local_size in ((0, 1, 2), (1, 1, 2), (2, 1, 2), (16, 9, 16)):
        available = mock.patch("torch.cuda.is_available", lambda gpus=gpus: gpus > 0)
        with available, mock.patch("torch.cuda.device_count", lambda gpus=gpus: gpus):
            got = answer.device_and_backend(local_rank, local_size)
        if not isinstance(got, tuple) or len(got) != 2:
            raise Wrong("type", "device_and_backend must return two things", "a device and a backend", repr(got))
        wanted = [f"cuda:{local_rank}", "nccl"] if gpus >= local_size else ["cpu", "gloo"]
        expect(f"device and backend where there are {gpus} GPUs", [str(got[0]), got[1]], wanted)


@test(points=2, ranks=(2,))
def goes_where_it_computes(answer, world, run):
    """main asks device_and_backend for this rank's place on its machine, and uses what comes back."""
    for run.machines in (1, 2):
        asked, seen, model = [], [], model_of(answer, seed=1)

        def chosen(local_rank, local_world_size, asked=asked):
            asked.append((local_rank, local_world_size))
            return moved.device, "cpu:gloo"

        def looks(module, inputs, seen=seen):
            seen.append((inputs[0] in moved, all(parameter in moved for parameter in module.parameters())))

        model.register_forward_pre_hook(looks)
        with Moved() as moved, mock.patch.dict(inspect.unwrap(answer.main).__globals__, device_and_backend=chosen):
            run(answer.main, Samples(EVEN[0]), model, epochs=1, batch_size=EVEN[1])
        case = f"2 ranks on {run.machines} machine{'s' * (run.machines > 1)}"
        place = (world.rank, 2) if run.machines == 1 else (0, 1)
        expect("(LOCAL_RANK, LOCAL_WORLD_SIZE) as main gives them to device_and_backend", asked[:1], [place], case=case)
        case = f'device_and_backend gives ({moved.device}, "cpu:gloo")'
        expect("the backend that main gives to init_process_group", run.backend, "cpu:gloo", case=case)
        for what, there in zip(("inputs", "model"), zip(*seen, strict=True), strict=False):
            expect(f"whether main brings the {what} to that device", all(there), True, case=case)


@test(points=3, ranks=(1, 2, 4))
def each_sample_once_per_epoch(answer, world, run):
    """Over all ranks every sample is read once per epoch, and no rank does the work of others."""
    for sizes, epochs in ((EVEN, 1), (UNEVEN, 2)):
        case = told(sizes, epochs)
        reads = run.gather(trained(answer, run, sizes, epochs).reads)
        total = [sum(each) for each in zip(*reads, strict=True)]
        expect("how often each sample was read by all ranks together", total, [epochs] * sizes[0], case=case)
        most = epochs * math.ceil(sizes[0] / sizes[1]) * math.ceil(sizes[1] / world.size)
        by_rank = [sum(each) for each in reads]
        expect(
            f"samples read by each rank, {most} at most", by_rank, [min(count, most) for count in by_rank], case=case
        )


@test(points=3, ranks=(1, 2, 4))
def equals_one_process(answer, run):
    """From equal starts, the parameters on every rank are those of one process."""
    got, expected = trained(answer, run, EVEN, 1).parameters, one_process(EVEN, 1)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case=told(EVEN, 1))


@test(points=3, ranks=(2, 4))
def equals_one_process_in_uneven_batches(answer, run):
    """So they are when a batch does not divide by the number of ranks, or has fewer samples than there are ranks."""
    got, expected = trained(answer, run, UNEVEN, 2).parameters, one_process(UNEVEN, 2)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case=told(UNEVEN, 2))


@test(points=2, ranks=(2,))
def replicas_start_as_rank_0(answer, world, run):
    """Replicas that were made with other values on every rank start as the one of rank 0."""
    got, expected = trained(answer, run, EVEN, 1, seed=world.rank + 1).parameters, one_process(EVEN, 1, seed=1)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case="replicas that differ")


@test(points=1, ranks=(2,))
def one_step_per_batch(answer, run):
    """The optimizer takes one step for each batch of each epoch."""
    steps = math.ceil(EVEN[0] / EVEN[1])
    expect("steps of the optimizer", trained(answer, run, EVEN, 1).steps, steps, case=told(EVEN, 1))


@test(points=1, ranks=(1,))
def ends_its_group(answer, run):
    """When main returns, the process group is ended."""
    expect("whether the process group was ended", trained(answer, run, EVEN, 1).ended, True, case="main(...)")


@test(points=1, ranks=(2,))
def nothing_more_is_sent(answer, world, run):
    """Each gradient goes over the network once per step, and the parameters at the start."""
    sent = sum(run.gather(trained(answer, run, EVEN, 1).sent))
    # An all-reduce among n ranks sends 2 (n - 1) times its tensor; a broadcast half of that, or all if done otherwise.
    whole = 2 * (world.size - 1) * sum(8 * math.prod(shape) for shape in SHAPES)
    steps = math.ceil(EVEN[0] / EVEN[1])
    most = (steps + 1) * whole + 1000
    case = f"{told(EVEN, 1)}: {steps} steps and the start"
    expect(f"at most {most} bytes sent by both ranks together, not {sent}", sent <= most, True, case=case)


@test(points=1)
def runs_as_a_program(answer, run):
    """The whole file runs to its end when torchrun starts it."""
    linecache.getlines(__file__)  # torch looks up the lines of all callers, and for an answer this file is closed
    run(runpy.run_path, inspect.unwrap(answer.main).__code__.co_filename, run_name="__main__")
    expect("whether it has called init_process_group", run.joined, True, case="torchrun ... THIS_FILE")
