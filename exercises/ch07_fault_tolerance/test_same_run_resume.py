"""Tests of same_run_resume: a run that is stopped, saved and resumed, beside the same run without a stop."""

import json

import torch
from torch import nn

from exercises.recorded_disk import RecordedDisk
from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object
from minidist.config import PrecisionConfig
from minidist.fault.agree import ErrorOnAnyRank
from minidist.fault.simple.agreement import train_step
from minidist.fault.simple.checkpoint import save as save_checkpoint
from minidist.fault.simple.run import Run
from minidist.precision.scaler import LossScaler

SAMPLES = 10
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
}


class Model(nn.Module):
    """A layer with dropout, and two buffers that every step changes; one of them is not persistent."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3) / 8 + start)
        self.bias = nn.Parameter(torch.full((2,), start))
        self.register_buffer("average", torch.tensor(start))
        self.register_buffer("offset", torch.tensor(start), persistent=False)

    def forward(self, values):
        return nn.functional.dropout(values @ self.weight.T + self.bias + self.offset / 8, 0.5)


def make_run(start, optimizer="AdamW", scaled=False, seed=5, seen=None):
    """A run whose parameters and buffers start at `start`; the samples it uses are appended to `seen`."""
    model = Model(start)

    def sample_loss(sample):
        if seen is not None:
            seen.append(sample)
        return (model(torch.tensor([1.0, sample / 4, -0.5])) - 0.25).square().sum()

    scaler = LossScaler(PrecisionConfig(initial_scale=4.0, growth_interval=3)) if scaled else None
    made = OPTIMIZERS[optimizer](model.parameters())
    return Run(model, made, sample_loss, SAMPLES, 3, lambda step: 0.1 / (1 + step), seed, scaler)


def train(run, network, steps):
    for _ in range(steps):
        train_step(run, network.group)
        for buffer in run.model.buffers():
            buffer.mul_(0.5).add_(1)


def everything(run):
    """All that decides the next step, read by the test itself."""
    tensors = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    tensors |= {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    for name, parameter in run.model.named_parameters():
        states = run.optimizer.state.get(parameter, {})
        tensors |= {f"{key} of {name}": value.clone() for key, value in states.items() if value is not None}
    return tensors


def save(answer, run, disk, network):
    state = answer.run_state(run)
    if json.loads(json.dumps(state)) != state:
        raise Wrong("type", "run_state must return a JSON object, with keys that are texts", "", repr(state)[:80])
    save_checkpoint(disk, run.step, answer.run_shards(run, network.group.rank == 0), state, network.group)


def shared_disk(world, network, disk):
    """A disk with the files of all ranks' disks, as if they had one in common."""
    files = {}
    for each in reversed(all_gather_object(disk.files, network.group)):
        files |= each
    folders = {name.split("/")[0] for name in files if not name.split("/")[0].endswith(".partial")}
    moved = {}
    for name, data in files.items():  # only rank 0's disk has seen the rename
        folder, _, file = name.partition("/")
        target = folder.removesuffix(".partial")
        moved[f"{target if target in folders else folder}/{file}"] = data
    return RecordedDisk(moved)


def resumed(answer, world, network, stops, steps, **options):
    """A run that is saved and resumed after each of `stops` steps, by a new run that started elsewhere."""
    run = make_run(0.5, **options)
    for number, stop in enumerate(stops):
        train(run, network, stop - run.step)
        disk = RecordedDisk({})
        save(answer, run, disk, network)
        run = make_run(9.0 + number, **{**options, "seed": 99})
        if number % 2:  # its optimizer may have states already
            train(run, network, 1)
        if answer.resume(run, shared_disk(world, network, disk), network.group) is not True:
            raise Wrong("wrong", "resume must return True if there is a checkpoint", "True", "")
    train(run, network, steps - run.step)
    return run


def expect_same(got, expected, case):
    for name, tensor in everything(expected).items():
        expect(f"{name} after the last step", everything(got).get(name), tensor, case=case)
    for name in ("step", "position", "seed"):
        expect(f"run.{name}", getattr(got, name), getattr(expected, name), case=case)


@test(points=3, ranks=(1,))
def names_every_tensor(answer, world, network):
    """run_shards has each parameter, buffer and optimizer state under its name, as a full tensor in place."""
    run = make_run(0.5)
    for steps in (0, 2):
        train(run, network, steps)
        names = {f"params/{name}": parameter for name, parameter in run.model.named_parameters()}
        names |= {"buffers/average": run.model.average, "buffers/offset": run.model.offset}
        if steps:
            for name, parameter in run.model.named_parameters():
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    names[f"optimizer.{key}/{name}"] = run.optimizer.state[parameter][key]
        for is_saved_here in (True, False):
            shards = answer.run_shards(run, is_saved_here)
            expect(
                "the names", sorted(shard.name for shard in shards), sorted(names), case=f"AdamW after {steps} steps"
            )
            for shard in shards:
                full = (shard.box.start, shard.box.stop, shard.is_saved_here)
                shape = tuple(names[shard.name].shape)
                expect(f"box and is_saved_here of {shard.name}", full, ((0,) * len(shape), shape, is_saved_here))
                same = shard.tensor.data_ptr() == names[shard.name].data_ptr()
                expect(f"whether the tensor of {shard.name} is the run's own", same, True)


@test(points=7, ranks=(1, 2, 3))
def steps_go_on_bit_by_bit(answer, world, network):
    """After two stops every tensor has the bits of the run without a stop, for each optimizer."""
    for optimizer in OPTIMIZERS if world.size == 1 else ("AdamW",):
        whole = make_run(0.5, optimizer=optimizer)
        train(whole, network, 9)
        got = resumed(answer, world, network, (3, 5), 9, optimizer=optimizer)
        expect_same(got, whole, f"{optimizer}; stopped after steps 3 and 5, 9 steps in all")


@test(points=3, ranks=(1,))
def every_sample_in_its_turn(answer, world, network):
    """The resumed run sees the samples that the other run sees, in the same order, also within an epoch."""
    seen, seen_again = [], []
    train(make_run(0.5, seen=seen), network, 10)
    resumed(answer, world, network, (2, 7), 10, seen=seen_again)
    del seen_again[21:24]  # the step in which the third run got states before it resumed
    expect("the samples, in order", seen_again, seen, case="stopped after steps 2 and 7; 3 samples per step")
    run, disk, case = make_run(0.5), RecordedDisk({}), "2 steps of 4 samples, resumed by a run of 3 samples per step"
    run.batch_size = 4
    train(run, network, 2)
    save(answer, run, disk, network)
    fresh = make_run(9.0)
    answer.resume(fresh, shared_disk(world, network, disk), network.group)
    expect("run.position", fresh.position, 8, case=case)


@test(points=3, ranks=(2,))
def loss_scale_goes_on(answer, world, network):
    """The loss scale and its count of good steps are those of the run without a stop."""
    whole = make_run(0.5, scaled=True)
    train(whole, network, 8)
    got = resumed(answer, world, network, (2, 4), 8, scaled=True)
    expect_same(got, whole, "AdamW with a loss scale that doubles after 3 good steps; stopped after steps 2 and 4")
    expect("the state of the scaler", got.scaler.state_dict(), whole.scaler.state_dict())


@test(points=4, ranks=(1, 2))
def damaged_checkpoints_are_passed_over(answer, world, network):
    """The newest intact checkpoint is used; damaged ones are renamed, and a partial folder does not count."""
    run, disk, states = make_run(0.5), RecordedDisk({}), {}
    for step in (1, 2, 3):
        train(run, network, 1)
        save(answer, run, disk, network)
        states[step] = everything(run)
    shared = shared_disk(world, network, disk)
    shared.files["step-00000009.partial/index.json"] = b"never finished"
    for spoil, left in (("step-00000003/index.json", 2), ("step-00000002/rank-00000.safetensors", 1)):
        shared.files[spoil] = shared.files[spoil][:-1] + bytes([shared.files[spoil][-1] ^ 1])
        fresh = make_run(9.0)
        expect("what resume returns", answer.resume(fresh, shared, network.group), True, case=f"{spoil} is damaged")
        expect("the step", fresh.step, left, case=f"{spoil} is damaged")
        for name, tensor in states[left].items():
            expect(name, everything(fresh).get(name), tensor, case=f"{spoil} is damaged")
        renames = [arguments for _, operation, arguments in shared.changes if operation == "rename"]
        renames, shared.changes = sum(all_gather_object(renames, network.group), []), []
        folder = spoil.split("/")[0]
        expect(
            "the renames of all ranks together", renames, [(folder, f"{folder}.damaged")], case=f"{spoil} is damaged"
        )
        shared.files = {name: data for name, data in shared.files.items() if not name.startswith(spoil.split("/")[0])}
    stale = RecordedDisk(shared.files)
    if world.rank == world.size - 1 > 0:
        stale.names = list  # it does not see the new folder yet, although it can read its files
    fresh, case = make_run(9.0), "the last rank's list of folders is empty"
    expect("what resume returns", answer.resume(fresh, stale, network.group), True, case=case)
    expect("the step", fresh.step, 1, case=case)
    spoiled = RecordedDisk({**shared.files, "step-00000001/rank-00000.safetensors": b"?"})
    fresh, case = make_run(9.0), "the only checkpoint is damaged"
    expect("what resume returns", answer.resume(fresh, spoiled, network.group), False, case=case)
    got = (fresh.step, fresh.position, fresh.model.bias[0].item())
    expect("step, position and the first bias", got, (0, 0, 9.0), case=case)
    empty = make_run(9.0)
    expect("what resume returns", answer.resume(empty, RecordedDisk({}), network.group), False, case="an empty disk")
    expect("the step", empty.step, 0, case="an empty disk")


@test(points=2, ranks=(2,))
def what_does_not_fit_is_an_error(answer, world, network):
    """A checkpoint of another model is intact, and no older one would fit: ErrorOnAnyRank, and nothing is renamed."""
    run, disk = make_run(0.5), RecordedDisk({})
    save(answer, run, disk, network)
    shared, fresh = shared_disk(world, network, disk), make_run(9.0)
    fresh.model.bias = nn.Parameter(torch.zeros(3))
    try:
        answer.resume(fresh, shared, network.group)
    except ErrorOnAnyRank:
        expect("the folders", shared.names(), ["step-00000000"])
        return
    raise Wrong("wrong", "resume must raise ErrorOnAnyRank", "ErrorOnAnyRank", "it returned")
