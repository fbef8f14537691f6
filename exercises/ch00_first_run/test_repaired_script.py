"""Tests of repaired_script: the reference trains on one process, from explicit formulas in float64."""

import math
import runpy
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from exercises.observations import DeviceMoveTracker
from exercises.testing import Wrong, expect, learner_file, learner_globals, test
from minidist.comm.meter import Meter

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
    """Return initial parameters that differ by seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in SHAPES]


def model_of(answer, seed):
    """Return the learner's network with the parameters start(seed)."""
    model = answer.Network().double()
    parameters = list(model.parameters())
    expect("the shapes of the network's parameters", [list(p.shape) for p in parameters], [list(s) for s in SHAPES])
    with torch.no_grad():
        for parameter, value in zip(parameters, start(seed), strict=True):
            parameter.copy_(value)
    return model


def one_process(sizes, epochs, seed=0):
    """Return the parameters of a single process after training from start(seed)."""
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
    """The results of one call of main: how often each sample was read, and the returned parameters.

    rows: samples that this rank passed through the model. sent: bytes that this rank sent. payload: bytes of the
    tensors of its messages, each counted once. joined, ended: whether main initialized and destroyed the process group.
    """

    reads: list
    parameters: list
    steps: int
    rows: int
    sent: int
    payload: int
    joined: bool
    ended: bool


RUNS = {}  # several tests use one run


def trained(answer, run, sizes, epochs, seed=0):
    """Run main from start(seed), or return the stored run; sizes: number of samples, batch size."""
    if (sizes, epochs, seed) not in RUNS:
        steps, rows, data, replica = [], [], Samples(sizes[0]), model_of(answer, seed)
        hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
        replica.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].numel() // 10))
        model = run(answer.main, data, replica, epochs=epochs, batch_size=sizes[1])
        hook.remove()
        if not isinstance(model, torch.nn.Module):
            raise Wrong("type", "main must return the trained model", "a Network", type(model).__name__)
        parameters = [parameter.detach().tolist() for parameter in model.parameters()]
        sent = sum(record.wire_bytes for record in run.records)
        payload = sum(record.payload_bytes for record in run.records)
        RUNS[sizes, epochs, seed] = Run(
            data.reads, parameters, len(steps), sum(rows), sent, payload, run.joined, run.ended
        )
    return RUNS[sizes, epochs, seed]


def describe_case(sizes, epochs):
    """Return the case in words, for messages."""
    return f"{sizes[0]} samples, batches of {sizes[1]}, {epochs} epoch{'s' * (epochs != 1)}"


@test(points=2, ranks=(1, 2))
def joins_with_the_assigned_rank(answer, run):
    """main joins with the rank that torchrun assigned, uses a backend that this machine supports, and returns."""
    expect("whether importing your file starts training", run.joined, False, case="import")
    result = trained(answer, run, EVEN, 1)
    expect("whether main called init_process_group", result.joined, True, case="main(...)")


@test(points=1)
def chooses_device_and_backend(answer):
    """Each rank uses its own GPU and nccl if the machine has a GPU per rank, otherwise the CPU and gloo."""
    cases = [(gpus, rank, size) for gpus in (0, 1, 2, 3, 5) for size in (1, 2, 3, 4) for rank in range(size)]
    for gpus, local_rank, local_size in [(0, 1, 2), (1, 1, 2), (2, 1, 2), (16, 9, 16), (15, 9, 16), *cases]:
        available = mock.patch("torch.cuda.is_available", lambda gpus=gpus: gpus > 0)
        with available, mock.patch("torch.cuda.device_count", lambda gpus=gpus: gpus):
            got = answer.device_and_backend(local_rank, local_size)
        if not isinstance(got, tuple) or len(got) != 2:
            raise Wrong("type", "device_and_backend must return two values", "a device and a backend", repr(got))
        wanted = [f"cuda:{local_rank}", "nccl"] if gpus >= local_size else ["cpu", "gloo"]
        expect(
            f"device and backend of local rank {local_rank} of {local_size} with {gpus} GPUs",
            [str(got[0]), got[1]],
            wanted,
        )


@test(points=2, ranks=(2,))
def uses_device_and_backend(answer, world, run):
    """main passes LOCAL_RANK and LOCAL_WORLD_SIZE to device_and_backend, and uses the returned device and backend."""
    original = Meter.record
    for run.machines in (1, 2):
        asked, seen, left_behind, model = [], [], [], model_of(answer, seed=1)

        def chosen(local_rank, local_world_size, asked=asked):
            asked.append((local_rank, local_world_size))
            return moved.device, "cpu:gloo"

        def looks(module, inputs, seen=seen):
            seen.append((inputs[0] in moved, all(parameter in moved for parameter in module.parameters())))

        def record(meter, *about, model=model, left_behind=left_behind, **more):
            made = original(meter, *about, **more)
            # Flat messages of DistributedDataParallel are made out of sight: then the model must have been moved.
            is_moved = made.device == str(moved.device) or all(parameter in moved for parameter in model.parameters())
            if made.dtype.is_floating_point and not is_moved:
                left_behind.append(made.name)
            return made

        model.register_forward_pre_hook(looks)
        with (
            DeviceMoveTracker() as moved,
            mock.patch.object(Meter, "record", record),
            mock.patch.dict(learner_globals(answer), device_and_backend=chosen),
        ):
            run(answer.main, Samples(EVEN[0]), model, epochs=1, batch_size=EVEN[1])
        case = f"2 ranks on {run.machines} machine{'s' * (run.machines > 1)}"
        place = (world.rank, 2) if run.machines == 1 else (0, 1)
        expect("the arguments (LOCAL_RANK, LOCAL_WORLD_SIZE) of device_and_backend", asked[:1], [place], case=case)
        case = f'device_and_backend returns ({moved.device}, "cpu:gloo")'
        expect("the backend that main passes to init_process_group", run.backend, "cpu:gloo", case=case)
        for what, there in zip(("inputs", "model"), zip(*seen, strict=True), strict=False):
            expect(f"whether main moves the {what} to that device", all(there), True, case=case)
        expect("operations on parameters or gradients that are not on that device", left_behind, [], case=case)


@test(points=3, ranks=(1, 2, 4))
def each_sample_once_per_epoch(answer, world, run):
    """The ranks together read every sample once per epoch, and divide reading and computing evenly."""
    for sizes, epochs in ((EVEN, 1), (UNEVEN, 2)):
        case = describe_case(sizes, epochs)
        reads = run.gather(trained(answer, run, sizes, epochs).reads)
        rows = run.gather(trained(answer, run, sizes, epochs).rows)
        total = [sum(each) for each in zip(*reads, strict=True)]
        expect("reads of each sample, summed over the ranks", total, [epochs] * sizes[0], case=case)
        most = epochs * math.ceil(sizes[0] / sizes[1]) * math.ceil(sizes[1] / world.size)
        by_rank = [sum(each) for each in reads]
        expect(
            f"samples read by each rank (at most {most})", by_rank, [min(count, most) for count in by_rank], case=case
        )
        what = f"samples that each rank passes through its model (at most {most})"
        expect(what, rows, [min(count, most) for count in rows], case=case)


@test(points=3, ranks=(1, 2, 4))
def equals_one_process(answer, run):
    """From equal initial parameters, every rank ends with the parameters of one process."""
    got, expected = trained(answer, run, EVEN, 1).parameters, one_process(EVEN, 1)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case=describe_case(EVEN, 1))


@test(points=3, ranks=(2, 4))
def equals_one_process_in_uneven_batches(answer, run):
    """Equal to one process also if a batch is not divisible by the number of ranks, or smaller than that number."""
    got, expected = trained(answer, run, UNEVEN, 2).parameters, one_process(UNEVEN, 2)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case=describe_case(UNEVEN, 2))


@test(points=2, ranks=(2,))
def replicas_start_as_rank_0(answer, world, run):
    """Replicas with different initial values start training with the parameters of rank 0."""
    got, expected = trained(answer, run, EVEN, 1, seed=world.rank + 1).parameters, one_process(EVEN, 1, seed=1)
    expect("the parameters after training", got, expected, tolerance=TOLERANCE, case="replicas that differ")


@test(points=1, ranks=(2,))
def one_step_per_batch(answer, run):
    """The optimizer takes one step for each batch of each epoch."""
    steps = math.ceil(EVEN[0] / EVEN[1])
    expect("steps of the optimizer", trained(answer, run, EVEN, 1).steps, steps, case=describe_case(EVEN, 1))


@test(points=1, ranks=(1, 2))
def destroys_its_process_group(answer, run):
    """main destroys the process group on every rank before it returns."""
    expect("whether main destroyed the process group", trained(answer, run, EVEN, 1).ended, True, case="main(...)")


@test(points=1, ranks=(2,))
def nothing_more_is_sent(answer, world, run):
    """Each gradient is sent once per step, each parameter once at the start, and nothing else."""
    sent = sum(run.gather(trained(answer, run, EVEN, 1).sent))
    # An all-reduce over n ranks sends 2 (n - 1) times its tensor in total; a broadcast sends half of that, or as much.
    model_bytes = sum(8 * math.prod(shape) for shape in SHAPES)
    full = 2 * (world.size - 1) * model_bytes
    steps = math.ceil(EVEN[0] / EVEN[1])
    most = (steps + 1) * full + 1000
    case = f"{describe_case(EVEN, 1)}: {steps} steps and the start"
    expect(f"at most {most} bytes sent by both ranks together (counted: {sent})", sent <= most, True, case=case)
    start = trained(answer, run, EVEN, 0)
    most, counted = model_bytes + 1500, start.payload  # pickled, these four parameters take 1,415 bytes more
    case = f"{describe_case(EVEN, 0)}: each parameter is sent once"
    expect(f"at most {most} bytes in the messages of a rank (counted: {counted})", counted <= most, True, case=case)
    most, counted = steps * full + 1000, sent - sum(run.gather(start.sent))
    case = f"{describe_case(EVEN, 1)}, compared with none: {steps} steps"
    expect(f"at most {most} more bytes, those of the gradients (counted: {counted})", counted <= most, True, case=case)
    added = sum(run.gather(trained(answer, run, EVEN, 3).sent)) - sent
    most = 2 * steps * full + 1000
    case = f"{describe_case(EVEN, 3)}, compared with one epoch: {2 * steps} more steps"
    expect(f"at most {most} more bytes, those of the gradients (counted: {added})", added <= most, True, case=case)


@test(points=1)
def runs_as_a_program(answer, run):
    """The file runs to its end when torchrun starts it."""
    run(runpy.run_path, learner_file(answer), run_name="__main__")
    expect("whether the program called init_process_group", run.joined, True, case="torchrun ... THIS_FILE")
