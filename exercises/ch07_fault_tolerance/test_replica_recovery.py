"""Tests of replica_recovery: processes that are killed, beside a loop in one process that nothing ever interrupts."""

import dataclasses
import functools
import signal
import warnings
from unittest import mock

import torch
from torch import nn

from exercises.dying_ranks import run_processes
from exercises.recorded_disk import RecordedDisk
from exercises.testing import Wrong, expect, test
from minidist.comm import CommError, all_gather_object, all_reduce
from minidist.config import PrecisionConfig
from minidist.fault.simple import agreement
from minidist.fault.simple.checkpoint import save
from minidist.fault.simple.run import Run, resume, run_shards, run_state, samples_at
from minidist.hashing import hash64
from minidist.precision.scaler import LossScaler

MAY_SEED = True  # dropout masks are addressed by seeding torch
SAMPLES, BATCH, SEED = 11, 5, 3
TOLERANCE = 1e-9  # float64 sums in another order


def with_own_gradients(function):
    """Make the package's step call the answer's `local_gradients` while `function(answer, ...)` runs."""

    @functools.wraps(function)
    def run(answer, *args, **kwargs):
        with mock.patch.object(agreement, "local_gradients", answer.local_gradients):
            return function(answer, *args, **kwargs)

    return run


class Model(nn.Module):
    """A layer with dropout and a buffer, in float64."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 8 + start)
        self.bias = nn.Parameter(torch.full((2,), start, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(start))

    def forward(self, values):
        return nn.functional.dropout(values @ self.weight.T + self.bias, 0.5)


def loss_of(model, sample):
    values = torch.tensor([1.0, sample / 4, -0.5], dtype=torch.float64)
    return (model(values) - 0.25).square().sum()


def rate(step):
    return 0.02 / (1 + step)


def make_run(start=0.5, before_sample=lambda run: None, scale=None):
    """A run whose tensors begin at `start`; before_sample is called with the run before each sample."""
    model = Model(start)

    def sample_loss(sample):
        before_sample(run)
        run.seen.append((run.step, sample))
        return loss_of(model, sample)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    scaler = scale and LossScaler(PrecisionConfig(initial_scale=scale, growth_interval=2))
    run = Run(model, optimizer, sample_loss, SAMPLES, BATCH, rate, seed=SEED, scaler=scaler)
    run.seen = []
    return run


def batch_gradient(model, step, samples):
    """The gradient of the mean loss of some samples, by the test's own loop."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for sample in samples:
        torch.manual_seed(int(hash64(SEED, step, sample)) >> 1)
        gradients = torch.autograd.grad(loss_of(model, sample) / len(samples), list(model.parameters()))
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    return total


def batch(step):
    return samples_at(SEED, step * BATCH, BATCH, SAMPLES)


def one_process(steps):
    """Parameters and moments after so many steps of one process, by name."""
    model = Model(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), batch_gradient(model, step, batch(step)), strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return everything(model, optimizer)


def everything(model, optimizer):
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key} of {name}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def expect_same(got, expected, case):
    expect("the names of all tensors", sorted(got), sorted(expected), case=case)
    for name, tensor in expected.items():
        expect(f"{name} after the last step", got[name], tensor, case=case, tolerance=TOLERANCE)


def die():
    signal.raise_signal(signal.SIGKILL)


class MortalDisk(RecordedDisk):
    """A disk in memory; the process dies when it begins the save of `step`."""

    def __init__(self, step=None):
        super().__init__({})
        self.fatal = None if step is None else f"step-{step:08d}"

    def write(self, name, data):
        if self.fatal and name.startswith(self.fatal):
            die()
        super().write(name, data)


@with_own_gradients
def train_with_deaths(answer, size, steps, deaths, joiners=0, save_every=3, ahead=None):
    """Train in processes of which some die; return what those that reach the end return, and all groups.

    deaths: by number of a process, the step in which it is killed, and "sample" or "save". joiners: how many new
    processes are started, one after each death. ahead: (number, step): this process loses its connections when the
    all-reduce of that step has given it the sum, before its update.
    """

    def train(number, rendezvous):
        step, moment = deaths.get(number, (None, ""))

        def before_sample(run):
            if moment == "sample" and run.step == step:
                die()

        def break_after_sum(tensor, group, op, async_op):
            handle = all_reduce(tensor, dataclasses.replace(group, algorithm=None), op, async_op=async_op)
            if (number, run.step) == ahead and not lost:
                lost.append(run.step)
                raise CommError("all_reduce failed: Connection closed by peer")
            return handle

        def breaking_rendezvous(group):
            return dataclasses.replace(rendezvous(group), algorithm=break_after_sum if ahead else None)

        joins, lost, disk = number >= size, [], MortalDisk(step if moment == "save" else None)
        run = make_run(9.0 if joins else 0.5, before_sample)
        run.seed = 99 if joins else SEED
        last = answer.train(run, disk, breaking_rendezvous, steps, save_every, joins)
        state = {"step": run.step, "position": run.position, "seed": run.seed, "files read": disk.reads}
        return everything(run.model, run.optimizer), state, run.seen, last and last.size

    started = []

    def replace_dead(processes):
        if len(started) < min(joiners, len(processes.dead)):
            started.append(processes.start_process())

    return run_processes(answer, train, size, replace_dead)


def expect_trained(processes, steps, alive, case):
    """Fail unless the processes `alive`, and no others, end with the state of the run that nothing interrupted."""
    expect("the processes that reach the end", sorted(processes.values), alive, case=case)
    state = {"step": steps, "position": steps * BATCH, "seed": SEED, "files read": []}
    for number, (tensors, ended_with, _, size) in processes.values.items():
        expect(f"step, position, seed and files read of process {number}", ended_with, state, case=case)
        expect_same(tensors, one_process(steps), case=f"process {number}; {case}")
        expect("the size of the group that train returns", size, len(alive), case=case)


@test(points=4)
def parts_add_up_for_any_number_of_ranks(answer, world, network):
    """The local gradients of 1 to 5 ranks add up to the gradient of the global batch; each sample is used once."""
    for size in (1, 2, 3, 4, 5, 7):
        for step in (0, 2):
            for scale in (None, 64.0):
                run, totals = make_run(scale=scale), 0
                run.step, run.position = step, step * BATCH
                for rank in range(size):
                    group = dataclasses.replace(network.group, rank=rank, ranks=tuple(range(size)))
                    parts = answer.local_gradients(run, group)
                    shapes = [tuple(part.shape) for part in parts]
                    expect("the shapes of the gradients", shapes, [(2, 3), (2,)], case=f"rank {rank} of {size}")
                    totals = [a + b for a, b in zip(totals or [0, 0], parts, strict=True)]
                case = f"step {step}, 5 samples on {size} ranks" + (f", loss scale {scale:g}" if scale else "")
                used = sorted(sample for _, sample in run.seen)
                expect("the samples that all ranks together use", used, sorted(batch(step)), case=case)
                for total, wanted in zip(totals, batch_gradient(run.model, step, batch(step)), strict=True):
                    expect("the sum of all parts", total, wanted * (scale or 1), case=case, tolerance=TOLERANCE)
                expect("run.step, run.position", (run.step, run.position), (step, step * BATCH), case=case)


@test(points=4, ranks=(1, 2, 3))
def everyone_gets_the_newest_state(answer, world, network):
    """recover gives all ranks the tensors and the state of the one with the most steps, in one broadcast of each."""
    for ahead in range(world.size):
        for steps in ((2, 1), (2, 0)):
            run = make_run(0.5 + world.rank, scale=8.0)
            run.seed = 99 if world.rank != ahead else SEED
            for _ in range(steps[world.rank != ahead]):
                agreement.train_step(run, dataclasses.replace(network.group, ranks=(0,), rank=0, process_group=None))
            wanted = all_gather_object((everything(run.model, run.optimizer), run_state(run)), network.group)[ahead]
            given, asked, before = object(), [], len(network.records)

            def rendezvous(group, asked=asked):
                asked.append(group)
                return network.group

            got = answer.recover(run, given, rendezvous)
            case = f"rank {ahead} has made 2 steps, the others {steps[1]}"
            expect("whether the group is that of the rendezvous", got is network.group, True, case=case)
            expect("whether rendezvous was called once, with the old group", [g is given for g in asked], [True])
            expect_same(everything(run.model, run.optimizer), wanted[0], case)
            expect("step, position, seed and scaler", run_state(run), wanted[1], case=case)
            sent = [record.payload_bytes for record in network.records[before:] if record.name.startswith("broadcast")]
            if world.size > 1:
                count = sum(tensor.numel() * tensor.element_size() for tensor in wanted[0].values())
                expect("the bytes of all broadcasts", sum(sent), count, case=case)


@test(points=5)
def survivors_finish_the_step(answer, world, network):
    """A process is killed while it computes; the others repeat the step without it, and no sample is lost."""
    for size, dying, step in ((2, 0, 1), (3, 1, 4)):
        case = f"process {dying} of {size} is killed in step {step}, before its all-reduce"
        processes = train_with_deaths(answer, size, 6, {dying: (step, "sample")})
        alive = [number for number in range(size) if number != dying]
        expect_trained(processes, 6, alive, case)
        used = sorted(sample for _, _, seen, _ in processes.values.values() for at, sample in seen if at == 5)
        expect("the samples of the last step, on all survivors", used, sorted(batch(5)), case=case)


@test(points=3)
def new_rank_joins_with_the_state_of_a_peer(answer, world, network):
    """After the next save a new process joins; it reads no file, and trains on from the state of the others."""
    case = "process 0 of 2 is killed in step 1; process 2 joins after the save of step 3"
    processes = train_with_deaths(answer, 2, 7, {0: (1, "sample")}, joiners=1)
    expect_trained(processes, 7, [1, 2], case)
    expect("the members of all groups", processes.groups, [[0, 1], [1], [1, 2], [1, 2]], case=case)
    steps = sorted({at for at, _ in processes.values[2][2]})
    expect("the steps in which process 2 uses samples", steps, [3, 4, 5, 6], case=case)


@test(points=3)
def one_survivor_is_ahead(answer, world, network):
    """One survivor has made the update of the last step, another has not: all go on from the newer state."""
    case = "process 0 loses its connection before the update of step 2; process 2 is killed after its own"
    processes = train_with_deaths(answer, 3, 5, {2: (3, "sample")}, save_every=9, ahead=(0, 2))
    expect_trained(processes, 5, [0, 1], case)


@test(points=3)
def death_while_saving(answer, world, network):
    """A process is killed in a save, and later another: the last one trains on alone."""
    case = "process 2 of 3 is killed in the save of step 2, process 0 in step 3"
    processes = train_with_deaths(answer, 3, 5, {2: (2, "save"), 0: (3, "sample")}, save_every=2)
    expect_trained(processes, 5, [1], case)


@test(points=3, ranks=(1, 2))
@with_own_gradients
def begins_from_the_newest_checkpoint(answer, world, network):
    """Without `join`, train resumes from the disk; a save that fails on a full disk does not end it."""
    run, disk = make_run(), RecordedDisk({})
    while run.step < 2:
        agreement.train_step(run, network.group)
    save(disk, 2, run_shards(run, world.rank == 0), run_state(run), network.group)
    files = {}
    for each in reversed(all_gather_object(disk.files, network.group)):
        files |= {name.replace(".partial", ""): data for name, data in each.items()}
    run, disk = make_run(7.0), RecordedDisk(files, failing=[("write", ".safetensors")])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        answer.train(run, disk, lambda group: network.group, 5, 2)
    case = "a checkpoint of step 2 on a full disk; 5 steps"
    messages = [str(one.message) for one in warned if "4" in str(one.message)]
    expect("warnings that name step 4, whose save failed", len(messages), 1, case=case)
    expect("run.step, run.position, run.seed", (run.step, run.position, run.seed), (5, 5 * BATCH, SEED), case=case)
    expect_same(everything(run.model, run.optimizer), one_process(5), case)
    expect("the steps of this call", sorted({at for at, _ in run.seen}), [2, 3, 4], case=case)
    expect("the checkpoints", [name for name in disk.names() if "partial" not in name], ["step-00000002"], case=case)


@test(points=2, ranks=(1, 2))
@with_own_gradients
def checkpoints_hold_the_whole_state(answer, world, network):
    """A checkpoint that train has saved gives a new run every tensor, and the state after that step."""
    run, disk = make_run(scale=8.0), RecordedDisk({})
    answer.train(run, disk, lambda group: network.group, 4, 2)
    files = {}
    for each in reversed(all_gather_object(disk.files, network.group)):
        files |= {name.replace(".partial", ""): data for name, data in each.items()}
    found, case = make_run(9.0, scale=8.0), "4 steps, a checkpoint after every second"
    found.seed = 99
    expect("whether a run can be resumed", resume(found, RecordedDisk(files), network.group), True, case=case)
    expect("step, position, seed and scaler after resuming", run_state(found), run_state(run), case=case)
    expect_same(everything(found.model, found.optimizer), one_process(4), case)


@test(points=2)
@with_own_gradients
def other_errors_end_the_run(answer, world, network):
    """Only a lost connection is survived: any other error ends this process, and is not hidden or tried again."""

    class Bug(Exception):
        pass

    def before_sample(run):
        tried.append(run.step)
        if len(tried) > 20:
            raise KeyboardInterrupt
        raise Bug

    tried = []
    try:
        answer.train(make_run(before_sample=before_sample), RecordedDisk({}), lambda group: network.group, 3, 2)
    except Bug:
        expect("how often the step was tried", tried, [0])
        return
    except KeyboardInterrupt:
        pass
    raise Wrong("wrong", "an error in the model must be raised by train", "the model's own error", "it is hidden")
