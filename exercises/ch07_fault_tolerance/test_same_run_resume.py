"""Tests of same_run_resume: a run that is stopped, saved and resumed, beside the same run without a stop."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from exercises.small_trainer import expect_same_state, make_trainer, shared_folder, tensors_of
from exercises.testing import Wrong, expect, test
from minidist.comm import barrier
from minidist.errors import DamagedError, UserError
from minidist.parameters import Box, ParamSpec
from minidist.simple import checkpoint

OPTIMIZERS = {
    "AdamW": ({"optim__kind": "adamw"}, lambda parameters: torch.optim.AdamW(parameters, foreach=False)),
    "SGD with momentum": (
        {"optim__kind": "sgd", "optim__momentum": 0.5},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5, foreach=False),
    ),
    "SGD": (
        {"optim__kind": "sgd", "optim__momentum": 0.0},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    ),
}
FP16 = {"precision__policy": "fp16", "precision__growth_interval": 3, "precision__initial_scale": 64.0}


class Model(nn.Module):
    """Two parameters that are trained, one that is frozen, and two buffers, one of which is not persistent."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.bias = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("average", torch.tensor([1.5]))
        self.register_buffer("offset", torch.tensor([2.5]), persistent=False)


def make_engine(optimizer, rank, boxes, replicas):
    """What state_shards reads of an engine. boxes: of this rank's master of the weight, a flat range of it.

    replicas: the ranks that have all other tensors.
    """
    model = Model()
    flat = torch.cat([model.weight.detach()[box.slices].flatten() for box in boxes])
    masters = {"weight": nn.Parameter(flat.clone()), "bias": nn.Parameter(model.bias.detach().clone())}
    specs = {
        name: ParamSpec(name, tuple(tensor.shape), (Box.whole(tuple(tensor.shape)),), replicas)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    own = ParamSpec("weight", (2, 3), boxes, (rank,))
    parallel = SimpleNamespace(specs=specs, master_specs={**specs, "weight": own})
    return SimpleNamespace(
        model=model,
        reducer=SimpleNamespace(masters=masters),
        optimizer=OPTIMIZERS[optimizer][1](list(masters.values())),
        parallel=parallel,
        groups=SimpleNamespace(world=SimpleNamespace(rank=rank)),
        merger=None,
    )


@test(points=5)
def names_every_tensor(answer, world, network):
    """state_shards has every tensor under its name, box by box, in place, saved by one of the ranks that have it."""
    parts = {0: (Box((0, 0), (1, 3)), Box((1, 0), (2, 1))), 1: (Box((1, 1), (2, 3)),)}
    expect_names_of_replicas(answer, parts[0])
    for optimizer, first in itertools.product(OPTIMIZERS, (0, 2)):
        for at, boxes in parts.items():
            rank = first + at
            engine = make_engine(optimizer, rank, boxes, (first, first + 1))
            for steps in (0, 1):
                if steps:
                    for master in engine.reducer.masters.values():
                        master.grad = torch.ones_like(master)
                    engine.optimizer.step()
                expect_shards(
                    answer.state_shards(engine),
                    engine,
                    rank,
                    f"rank {rank}, {optimizer}, {steps} steps, replicas on the ranks {first} and {first + 1}",
                )


def expect_names_of_replicas(answer, boxes):
    """Of replicas that train separately, each has its own masters and optimizer states, and all share the rest."""
    for replica in (0, 1):
        engine = make_engine("SGD", 0, boxes, (0,))
        merger = {"group": SimpleNamespace(rank=replica), "num_tokens": torch.zeros(1), "outer_states": dict}
        engine.merger, engine.control = SimpleNamespace(**merger), SimpleNamespace(rank=0)
        prefix = "replica-1." * replica
        wanted = {f"{prefix}{name}": True for name in ("params/weight", "params/bias", "merge/tokens")}
        wanted |= dict.fromkeys(("params/frozen", "buffers/average", "buffers/offset"), replica == 0)
        got = {shard.name: shard.is_saved_here for shard in answer.state_shards(engine)}
        case = f"replica {replica} of 2 that train separately"
        expect("the names, sorted", sorted(got), sorted(wanted), case=case)
        expect("is_saved_here by name", got, wanted, case=case)


def expect_shards(shards, engine, rank, case):
    wanted = []
    for name, master in engine.reducer.masters.items():
        spec = engine.parallel.master_specs[name]
        for kind, tensor in {"params": master, **optimizer_states(engine, master)}.items():
            if tensor.dim():
                starts = [sum(box.numel for box in spec.boxes[:at]) for at in range(len(spec.boxes))]
                for box, start in zip(spec.boxes, starts, strict=True):
                    address = tensor.data_ptr() + start * tensor.element_size()
                    wanted.append((f"{kind}/{name}", spec.shape, box.start, box.stop, address, spec.owner == rank))
            else:
                has_first = spec.owner == rank and not any(spec.boxes[0].start)
                wanted.append((f"{kind}/{name}", (), (), (), tensor.data_ptr(), has_first))
    model = engine.model
    others = {"params/frozen": model.frozen, "buffers/average": model.average, "buffers/offset": model.offset}
    for name, tensor in others.items():
        shape = tuple(tensor.shape)
        owner = engine.parallel.specs[name.partition("/")[2]].owner
        wanted.append((name, shape, (0,), shape, tensor.data_ptr(), rank == owner))
    got = [(s.name, tuple(s.shape), s.box.start, s.box.stop, s.tensor.data_ptr(), s.is_saved_here) for s in shards]
    names = [sorted({each[0] for each in rows}) for rows in (got, wanted)]
    expect("the names", *names, case=case)
    for each, other in zip(sorted(got), sorted(wanted), strict=True):
        expect(f"shape, box, address in memory and is_saved_here of {other[0]}", each[1:], other[1:], case=case)


def optimizer_states(engine, master):
    return {
        f"optimizer.{key}": value for key, value in engine.optimizer.state.get(master, {}).items() if value is not None
    }


def save(answer, trainer, root):
    """Save a checkpoint of what the answer collects; returns its folder."""
    state, scaler = answer.json_state(trainer), trainer.engine.scaler
    if json.loads(json.dumps(state)) != state:
        raise Wrong("type", "json_state must return a JSON object, with keys that are texts", "", repr(state)[:80])
    wanted = {
        "config": trainer.config_text,
        "step": trainer.progress.step,
        "position": trainer.progress.consumed_samples,
        "corpus": trainer.corpus.fingerprint,
        "corpus_name": trainer.corpus.describe(),
        "replicas": trainer.config.num_replicas(trainer.mesh),
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }
    expect("the keys of json_state, sorted", sorted(state), sorted(wanted), case=f"step {trainer.progress.step}")
    for key, value in wanted.items():
        expect(f'"{key}" of json_state', state[key], value, case=f"step {trainer.progress.step}")
    shards = answer.state_shards(trainer.engine)
    return checkpoint.save(root, trainer.progress.step, shards, state, trainer.control)


def expect_resumed(answer, trainer, paths, path, case):
    expect("the path that resume returns", str(answer.resume(trainer, paths)), str(path), case=case)


@test(points=7, ranks=(1, 2, 3))
def steps_go_on_bit_by_bit(answer, world, network):
    """After two stops every tensor and every loss has the bits of the run without a stop, for each optimizer."""
    with shared_folder(world, network.group) as folder:
        cases = {optimizer: changes for optimizer, (changes, _) in OPTIMIZERS.items()}
        if world.size > 1:
            cases = {"AdamW": cases["AdamW"]}
        if world.size == 2:
            cases["local SGD, a merge every 4 steps"] = {"consistency__mode": "local", "consistency__h": 4}
        for optimizer, changes in cases.items():
            whole = make_trainer(world, folder, **changes)
            losses = [whole.step().loss for _ in range(6)]
            stopped = make_trainer(world, folder, **changes)
            for stop in (2, 3, 6):
                while stopped.progress.step < stop:
                    step = stopped.progress.step
                    got, case = stopped.step().loss, f"{optimizer}; stopped after steps 2 and 3"
                    expect(f"the loss of step {step}", got, losses[step], case=case)
                if stop < 6:
                    path = save(answer, stopped, folder / optimizer)
                    stopped = make_trainer(world, folder, steps=stop - 2, **changes)  # the second has states already
                    expect_resumed(answer, stopped, [path], path, case)
            expect_same_state(stopped, whole, case)


@test(points=3, ranks=(2,))
def loss_scale_and_masters_go_on(answer, world, network):
    """With fp16 the masters, the loss scale and its count of good steps are those of the run without a stop."""
    with shared_folder(world, network.group) as folder:
        whole = make_trainer(world, folder, steps=7, **FP16)
        stopped, case = make_trainer(world, folder, steps=4, **FP16), "fp16, a scale that doubles after 3 good steps"
        path = save(answer, stopped, folder / "fp16")
        fresh = make_trainer(world, folder, **FP16)
        expect_resumed(answer, fresh, [path], path, case)
        expect_same_state(fresh, stopped, f"{case}; right after the resume at step 4")
        for _ in range(3):
            fresh.step()
        expect_same_state(fresh, whole, f"{case}; stopped after step 4, 7 steps in all")
        plain = make_trainer(world, folder, steps=4)
        expect("the JSON state's loss_scaler", answer.json_state(plain)["loss_scaler"], None, case="fp32")
        other = save(answer, plain, folder / "fp32")
        for case, changes, found in (("fp16, resumed in fp32", {}, path), ("fp32, resumed in fp16", FP16, other)):
            fresh = make_trainer(world, folder, **changes)
            expect_resumed(answer, fresh, [found], found, f"saved in {case}")
            expect("completed steps", fresh.progress.step, 4, case=f"saved in {case}")
            fresh.step()


@test(points=3, ranks=(2,))
def another_layout_goes_on(answer, world, network):
    """A run with ZeRO is resumed without, and the other way round; another batch size begins at the same sample."""
    with shared_folder(world, network.group) as folder:
        for before, after in ((0, 1), (1, 0), (2, 3)):
            case = f"saved with ZeRO stage {before}, resumed with stage {after} and 8 samples per step"
            run = make_trainer(world, folder, steps=2, zero__stage=before)
            path = save(answer, run, folder / f"zero {before}")
            fresh = make_trainer(world, folder, zero__stage=after, train__global_batch=8)
            expect_resumed(answer, fresh, [path], path, case)
            progress = fresh.progress.step, fresh.progress.consumed_samples
            expect("completed steps and consumed samples", progress, (2, 24), case=case)
            if after < 3:  # stage 3 has no full parameters between steps
                for name, tensor in tensors_of(run).items():
                    if name.startswith("parameter"):
                        expect(name, tensors_of(fresh)[name], tensor, case=case)
            fresh.step()


@test(points=4, ranks=(1, 2))
def damaged_checkpoints_are_passed_over(answer, world, network):
    """The first intact checkpoint is used, with a note for each damaged one; if none is intact, DamagedError."""
    with shared_folder(world, network.group) as folder:
        run, paths, states = make_trainer(world, folder), [], []
        for _ in range(3):
            run.step()
            paths.insert(0, save(answer, run, folder / "damaged"))
            states.insert(0, tensors_of(run))
        if world.size == 2:
            fresh, case = make_trainer(world, folder), "only rank 1 cannot read checkpoint.json of step 3"
            with unreadable(paths[0] / "checkpoint.json" if world.rank == 1 else None):
                expect_resumed(answer, fresh, paths, paths[1], case)
            expect("completed steps", fresh.progress.step, 2, case=case)
            local = {"consistency__mode": "local", "consistency__h": 4}
            own, newest_first = make_trainer(world, folder, **local), []
            for _ in range(2):
                own.step()
                newest_first.insert(0, save(answer, own, folder / "local"))
            fresh, case = make_trainer(world, folder, **local), "local SGD; only rank 1 cannot read that of step 2"
            with unreadable(newest_first[0] / "checkpoint.json" if world.rank == 1 else None):
                expect_resumed(answer, fresh, newest_first, newest_first[1], case)
        for number, file in enumerate(("checkpoint.json", "rank-00000.safetensors"), 1):
            barrier(network.group)
            if world.rank == 0:
                damage(paths[number - 1] / file)
            barrier(network.group)
            fresh, notes, case = make_trainer(world, folder, steps=1), [], f"{file} of step {4 - number} is damaged"
            fresh.notify = lambda event, *args, notes=notes: notes.append((event, *args))
            expect_resumed(answer, fresh, paths, paths[number], case)
            expect("completed steps", fresh.progress.step, 3 - number, case=case)
            told = [(event, *(type(each).__name__ for each in args)) for event, *args in notes]
            expect("the events of the notes, and what each has", told, [("on_note", "str")] * number, case=case)
            for name, tensor in states[number].items():
                expect(name, tensors_of(fresh)[name], tensor, case=case)
        fresh, notes, case = make_trainer(world, folder), [], "both checkpoints that are given are damaged"
        fresh.notify = lambda *args: notes.append(args)
        before = tensors_of(fresh)
        try:
            answer.resume(fresh, paths[:2])
        except DamagedError:
            expect_as_before(fresh, before, case)
        else:
            raise Wrong("wrong", "resume must raise DamagedError", "DamagedError", "it returned", case=case)
        expect("the number of notes: one before the next checkpoint is tried", len(notes), 1, case=case)
        expect("what resume returns", answer.resume(fresh, []), None, case="there is no checkpoint")


def expect_as_before(trainer, before, case):
    """Fail unless a trainer that had not made a step has progress and parameters as before."""
    progress = trainer.progress.step, trainer.progress.consumed_samples
    expect("completed steps and consumed samples", progress, (0, 0), case=case)
    after = tensors_of(trainer)
    for name, tensor in before.items():
        expect(name, after.get(name), tensor, case=case)


@contextlib.contextmanager
def unreadable(file):
    """A context in which this rank cannot read a file, by whichever method of its path."""
    with contextlib.ExitStack() as patches:
        for name in ("open", "read_bytes", "read_text"):
            patches.enter_context(mock.patch.object(Path, name, failing_for(file, getattr(Path, name))))
        yield


def failing_for(file, method):
    """The method of a path, but an error for this one."""

    def read(path, *args, **kwargs):
        if path == file:
            raise OSError(f"{path}: input/output error")
        return method(path, *args, **kwargs)

    return read


def damage(file):
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


@test(points=3, ranks=(2,))
def another_run_is_an_error(answer, world, network):
    """A checkpoint of another text or of another model is intact: UserError, no older one is tried, nothing changes."""
    with shared_folder(world, network.group) as folder:
        run = make_trainer(world, folder, steps=2)
        path = save(answer, run, folder / "another")
        cases = {"another text": {"data__path": folder / "other"}, "another model": {"model__intermediate_size": 32}}
        for case, changes in cases.items():
            fresh = make_trainer(world, folder, **changes)
            before, older = tensors_of(fresh), save(answer, fresh, folder / case)
            try:
                answer.resume(fresh, [path, older])
            except UserError as error:
                expect("whether it is an error of damage", isinstance(error, DamagedError), False, case=case)
            else:
                raise Wrong("wrong", "resume must raise UserError", "UserError", "it returned", case=case)
            expect_as_before(fresh, before, case)
