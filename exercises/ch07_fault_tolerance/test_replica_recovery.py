"""Tests of replica_recovery: ranks that lose their state, or their process, beside a run that nothing ever disturbs."""

import math
import signal
import tempfile
from pathlib import Path

import torch

from exercises.dying_ranks import run_processes
from exercises.small_trainer import expect_same_state, make_trainer, shared_folder, tensors_of, write_texts
from exercises.testing import Wrong, expect, test
from minidist.comm import CommError, World
from minidist.config import MeshConfig
from minidist.errors import RunError
from minidist.parameters import Box, ParamSpec

FP16 = {"precision__policy": "fp16", "precision__growth_interval": 1, "precision__initial_scale": 64.0}
MOMENTUM = {"optim__kind": "sgd", "optim__momentum": 0.9}
TOLERANCE = 1e-5  # float32 sums over another number of ranks
# What each rank has: mesh and configuration.
LAYOUTS = {
    1: {"one rank": {}},
    2: {
        "data parallelism, SGD with momentum, fp64": MOMENTUM | {"precision__policy": "fp64"},
        "data parallelism, fp16": FP16,
    },
    3: {"data parallelism": {}},
    4: {
        "data and tensor parallelism": {"mesh": MeshConfig(dp=2, tp=2)},
        "data and pipeline parallelism, tied embeddings": {
            "mesh": MeshConfig(dp=2, pp=2),
            "model__num_layers": 2,
            "model__tie_embeddings": True,
        },
    },
}


def add_buffer(trainer):
    """Give the model a buffer of which every rank has a replica."""
    value, engine = torch.tensor([1.5, 2.0, -3.0]), trainer.engine
    engine.model.register_buffer("running_mean", value)
    engine.parallel.specs["running_mean"] = ParamSpec(
        "running_mean", (3,), (Box.whole((3,)),), tuple(range(engine.control.size))
    )


def spoil(trainer):
    """Overwrite all that a rank knows."""
    for tensor in (*trainer.engine.model.parameters(), *trainer.engine.model.buffers()):
        tensor.detach().fill_(math.nan)
    for master in trainer.engine.reducer.masters.values():
        master.detach().fill_(math.nan)
        for value in trainer.engine.optimizer.state.get(master, {}).values():
            value.fill_(7.0)


def reverse_optimizer_states(trainer):
    """Bring the optimizer's states of each parameter into another order, as after a resume from a checkpoint."""
    states = trainer.engine.optimizer.state
    for master in trainer.engine.reducer.masters.values():
        states[master] = dict(reversed(states[master].items()))


def expect_recovered(answer, trainer, source, ranks, case):
    expect("the ranks that recover returns", answer.recover(trainer, source), ranks, case=case)


@test(points=5, ranks=(2, 3, 4))
def damaged_rank_is_repaired(answer, world, network):
    """A rank whose state is damaged gets all of it from its replicas; the others keep theirs; then the run goes on."""
    with shared_folder(world, network.group) as folder:
        for layout, changes in LAYOUTS[world.size].items():
            whole = make_trainer(world, folder, steps=2, **changes)
            trainer = make_trainer(world, folder, steps=2, **changes)
            for each in (whole, trainer):
                add_buffer(each)
            for lost in (0, world.size - 1):
                case = f"{layout}; rank {lost} of {world.size} has lost its state"
                if world.rank == lost:
                    spoil(trainer)
                expect_recovered(answer, trainer, None if world.rank == lost else trainer, [lost], case)
                expect_same_state(trainer, whole, case)
                buffers = [each.engine.model.running_mean for each in (trainer, whole)]
                expect("a buffer of the model", *buffers, case=case)
                trainer.step()
                whole.step()
                expect_same_state(trainer, whole, f"{case}; a step later")
        whole, trainer = make_trainer(world, folder), make_trainer(world, folder)
        case = f"before the first step; rank 0 of {world.size} has lost its state"
        if world.rank == 0:
            spoil(trainer)
        expect_recovered(answer, trainer, None if world.rank == 0 else trainer, [0], case)
        expect_same_state(trainer, whole, case)


@test(points=4, ranks=(2, 3))
def new_rank_gets_the_state(answer, world, network):
    """All ranks have new trainers, one without an earlier one: it gets all of a healthy one's state."""
    with shared_folder(world, network.group) as folder:
        for layout, changes in LAYOUTS[world.size].items():
            old, new = make_trainer(world, folder, steps=2, **changes), make_trainer(world, folder, **changes)
            lost = world.size // 2
            if world.rank == lost:
                spoil(new)
            elif world.rank == 0:
                reverse_optimizer_states(old)
            case = f"{layout}; rank {lost} of {world.size} is new, the optimizer states of rank 0 are in reverse order"
            before = tensors_of(old)
            expect_recovered(answer, new, None if world.rank == lost else old, [lost], case)
            expect_same_state(new, old, case)
            for name, tensor in before.items():
                expect(f"the {name} of the earlier trainer", tensors_of(old)[name], tensor, case=case)
            new.step()
            old.step()
            expect_same_state(new, old, f"{case}; a step later")


@test(points=3, ranks=(2, 3))
def newest_state_wins(answer, world, network):
    """A rank that is one step behind receives; before the first step there are no optimizer states."""
    with shared_folder(world, network.group) as folder:
        for steps in (0, 1):
            for ahead in (0, world.size - 1):
                behind, further = make_trainer(world, folder, steps), make_trainer(world, folder, steps + 1)
                new = make_trainer(world, folder)
                case = f"rank {ahead} has completed {steps + 1} steps, the others {steps}"
                others = [rank for rank in range(world.size) if rank != ahead]
                expect_recovered(answer, new, further if world.rank == ahead else behind, others, case)
                expect_same_state(new, further, case)
                own, case = further if world.rank == ahead else behind, f"{case}; every rank is its own source"
                expect_recovered(answer, own, own, others, case)
                expect_same_state(own, new, case)
        trainer, whole = make_trainer(world, folder, 1), make_trainer(world, folder, 1)
        before = tensors_of(trainer)
        expect_recovered(answer, trainer, trainer, [], "no rank has lost anything")
        expect_same_state(trainer, whole, "no rank has lost anything")
        for name, tensor in before.items():
            expect(name, tensors_of(trainer)[name], tensor, case="no rank has lost anything")


@test(points=3, ranks=(2,))
def lost_shard_is_refused(answer, world, network):
    """If a shard has no healthy replica, all ranks raise RunError, and no tensor changes."""
    with shared_folder(world, network.group) as folder:
        cases = {f"ZeRO stage {stage}": {"zero__stage": stage} for stage in (1, 3)}
        cases["tensor parallelism"] = {"mesh": MeshConfig(tp=2)}
        for case, changes in cases.items():
            old, new = make_trainer(world, folder, 1, **changes), make_trainer(world, folder, **changes)
            expect_refused(answer, new, None if world.rank == 1 else old, f"{case}; rank 1 of 2 has lost its state")
        behind, further = (make_trainer(world, folder, steps, zero__stage=1) for steps in (0, 1))
        own, case = further if world.rank == 0 else behind, "ZeRO stage 1; rank 1 of 2 is one step behind"
        expect_refused(answer, own, own, case)
        trainer = make_trainer(world, folder, 1)
        expect_refused(answer, trainer, None, "data parallelism; both ranks have lost their states")


def expect_refused(answer, trainer, source, case):
    before, progress = tensors_of(trainer), trainer.progress
    try:
        answer.recover(trainer, source)
    except RunError as error:
        expect("whether the error is one of the connection", isinstance(error, CommError), False, case=case)
    else:
        raise Wrong("wrong", "recover must raise RunError on all ranks", "RunError", "it returned", case=case)
    expect("whether the progress changed", trainer.progress == progress, True, case=case)
    for name, tensor in before.items():
        expect(name, tensors_of(trainer)[name], tensor, case=case)


@test(points=3, ranks=(3, 4))
def only_what_is_lost_is_sent(answer, world, network):
    """A rank receives the bytes of its own state and no others, and a healthy rank receives none."""
    with shared_folder(world, network.group) as folder:
        for layout, changes in LAYOUTS[world.size].items():
            trainer = make_trainer(world, folder, 1, **changes)
            sizes = sum(t.numel() * t.element_size() for n, t in tensors_of(trainer).items() if "parameter" not in n)
            before = len(network.records)
            expect_recovered(answer, trainer, None if world.rank == 1 else trainer, [1], layout)
            got = sum(record.payload_bytes for record in network.records[before:] if record.name == "recv")
            case = f"{layout}; rank 1 of {world.size} has lost its state"
            expect("the bytes that this rank receives", got, sizes if world.rank == 1 else 0, case=case)


def train_with_deaths(answer, size, steps, deaths, joiners=0):
    """Train in processes of which some die; return the processes, with what each that reaches the end returns.

    deaths: by number of a process, the step in which it is killed. joiners: how many new processes are started, one
    after each death.
    """

    def train(number, rendezvous):
        group = rendezvous(None)
        trainer = make_trainer(group.world, folder, **MOMENTUM)
        if number >= size:
            answer.recover(trainer, None)
        while trainer.progress.step < steps:
            if deaths.get(number) == trainer.progress.step:
                signal.raise_signal(signal.SIGKILL)
            if not try_step(trainer) or trainer.progress.step == 3:  # after which new processes may join
                group = rendezvous(group)
                new = make_trainer(group.world, folder, **MOMENTUM)
                answer.recover(new, trainer)
                trainer = new
        return tensors_of(trainer), (trainer.progress.step, trainer.progress.consumed_samples), trainer.world.size

    started = []

    def replace_dead(processes):
        if len(started) < min(joiners, len(processes.dead)):
            started.append(processes.start_process())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        processes = run_processes(answer, train, size, replace_dead)
        return processes, tensors_of(make_trainer(World.single(), folder, steps, **MOMENTUM))


def try_step(trainer):
    """One step; False if the connection to another rank was lost."""
    try:
        trainer.step()
    except CommError:
        return False
    return True


def expect_trained(processes, expected, steps, alive, case):
    """Fail unless the processes `alive`, and no others, end with the state of the run that nothing interrupted."""
    expect("the processes that reach the end", sorted(processes.values), alive, case=case)
    for number, (tensors, progress, size) in processes.values.items():
        where = f"process {number}; {case}"
        expect("completed steps and consumed samples", progress, (steps, 12 * steps), case=where)
        expect("the number of ranks at the end", size, len(alive), case=where)
        for name, tensor in expected.items():
            expect(name, tensors[name], tensor, case=where, tolerance=TOLERANCE)


@test(points=5)
def survivors_go_on(answer, world, network):
    """A process is killed; the others repeat the step without it, from the state in their memory."""
    for size, dying, step in ((2, 0, 1), (3, 1, 4)):
        processes, expected = train_with_deaths(answer, size, 5, {dying: step})
        alive = [number for number in range(size) if number != dying]
        expect_trained(processes, expected, 5, alive, f"process {dying} of {size} is killed in step {step}")


@test(points=4)
def new_process_joins(answer, world, network):
    """A new process joins with the state of a peer, which it reads from no file."""
    processes, expected = train_with_deaths(answer, 2, 5, {0: 1}, joiners=1)
    case = "process 0 of 2 is killed in step 1; process 2 joins after step 3"
    expect("the members of all groups", processes.groups, [[0, 1], [1], [1, 2]], case=case)
    expect_trained(processes, expected, 5, [1, 2], case)
