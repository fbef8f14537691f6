"""What runs on ranks: the references, one process each, and the trainer, compared with them on the spot."""

import hashlib
import json
import math
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minidist.comm import Groups, World, bind, bind_all_gather_object
from minidist.fault import checkpoint
from minidist.parallelize import group_specs, parallelize
from minidist.parameters import Box, named_parameters
from minidist.tools.parity import reference
from minidist.tools.parity.cases import CLIPPED_STEP, GLOBAL_BATCH, RESUME_AFTER, SEED, STEPS, Case
from minidist.tools.parity.compare import Comparison, First
from minidist.tools.parity.muon import Both, Muon
from minidist.train.checkpoint_state import pieces, prepare
from minidist.train.engine import Engine


@dataclass(frozen=True)
class Record:
    """What one rank saw in one case.

    largest, worst, first: as in `Comparison`. shapes: of every tensor of the reference; held: this rank's boxes of it.
    digests: of this rank's parameters and buffers at the end. told: loss and norm of each step, as the step told them.
    clipped_steps: of the reference.
    """

    largest: dict[str, float]
    worst: tuple[float, str | None]
    first: First | None
    shapes: dict[str, tuple[int, ...]]
    held: dict[str, tuple[Box, ...]]
    digests: dict[str, str]
    told: tuple[tuple[float | None, float], ...]
    clipped_steps: int


def record_file(folder: str, number: int, rank: int) -> Path:
    """Where a rank leaves its record of case `number`."""
    return Path(folder, f"record-{number}-{rank}.pickle")


def first_file(folder: str, number: int, rank: int) -> Path:
    """Where a rank says what is wrong first in case `number` as soon as it knows."""
    return Path(folder, f"first-{number}-{rank}.pickle")


def reference_file(folder: str, number: int) -> str:
    """Where the gradients, parameters, losses and norms of reference `number` are."""
    return f"{folder}/reference-{number}.safetensors"


def run_references(world: World, cases: Sequence[Case], folder: str) -> None:
    """Train the references, shared out over processes that do not know of each other."""
    for number in range(world.rank, len(cases), world.size):
        write_reference(cases[number], reference_file(folder, number))


def write_reference(case: Case, file: str) -> None:
    """Train a case in one process and write what it gave."""
    model = case.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    config = case.config().optim
    adamw = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, **adamw)
    elif case.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=config.momentum, weight_decay=config.weight_decay)
    else:
        layers = {p for p in model.model.layers.parameters() if p.dim() == 2}
        muon = Muon(list(layers), config.muon_momentum, config.weight_decay)
        optimizer = Both(muon, torch.optim.AdamW([p for p in parameters if p not in layers], **adamw))
    loader = case.loader()
    batches = []
    for step in range(STEPS):
        batch = case.shape_labels(step, loader.global_batch(step * GLOBAL_BATCH, GLOBAL_BATCH))
        batches.append((batch.tokens, batch.labels, batch.samples))
    tensors: dict[str, Tensor] = {}
    scalars: list[tuple[float | None, float, int]] = []

    def look(step: int, loss: float | None, norm: float, tokens: int, grads: dict[str, Tensor | None]) -> None:
        scalars.append((loss, norm, tokens))
        tensors.update({f"{step}/{name}": grad for name, grad in grads.items() if grad is not None})

    lrs = [case.lr(step) for step in range(STEPS)]
    clip_norm = _between_norms(case, batches) if case.clip else math.inf
    reference.train(model, batches, optimizer, lrs, clip_norm, SEED, look)
    tensors.update({f"end/{name}": tensor.detach() for name, tensor in model.named_parameters()})
    tensors.update({f"end/{name}": tensor for name, tensor in model.named_buffers()})
    save_file(tensors, file, {"scalars": json.dumps(scalars), "clip_norm": json.dumps(clip_norm)})


def _between_norms(case: Case, batches: Sequence) -> float:
    """A norm that the step with the large gradient exceeds, and no other: half-way between it and the step before."""
    norms: list[float] = []
    model = case.model()
    still = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    steps = CLIPPED_STEP + 1
    reference.train(model, batches[:steps], still, [0.0] * steps, math.inf, SEED, lambda *seen: norms.append(seen[2]))
    return sum(norms[-2:]) / 2


def read_reference(file: str) -> tuple[list[tuple[float | None, float, int]], dict[str, Tensor], float]:
    """(loss, norm, tokens) of each step, the tensors (gradients `STEP/NAME`, parameters and buffers `end/NAME`), and
    the norm to clip to."""
    with safe_open(file, framework="pt") as stream:
        about = {key: json.loads(text) for key, text in stream.metadata().items()}
    return [tuple(row) for row in about["scalars"]], load_file(file), about["clip_norm"]


def run_cases(world: World, cases: Sequence[tuple[int, Case, int]], folder: str) -> None:
    """Run each case, given with its number and that of its reference, on these ranks, and leave a record of it."""
    groups: Groups | None = None
    for number, case, of in cases:
        mesh, wanted = case.plan.mesh, group_specs(case.plan.mesh, case.config())
        if groups is None or (groups.mesh, groups.uses) != (mesh, tuple(wanted)):
            if groups is not None:
                groups.destroy()
            groups = bind(world, mesh, wanted)
        found = partial(_leave, first_file(folder, number, world.rank))
        record = run_case(groups, case, reference_file(folder, of), found)
        _leave(record_file(folder, number, world.rank), record)


def _leave(file: Path, what: object) -> None:
    """Write a file that is whole as soon as it is there."""
    aside = file.with_suffix(".partial")
    aside.write_bytes(pickle.dumps(what))
    os.replace(aside, file)


def run_case(groups: Groups, case: Case, file: str, found: Callable[[First], None]) -> Record:
    """Train as the case says and compare every gradient, loss, norm and, at the end, parameter of this rank."""
    scalars, wanted, clip_norm = read_reference(file)
    seen, loader, told = Comparison(case.tolerance, found=found), case.loader(), []
    engine = _engine(groups, case, clip_norm)
    rank, mesh = groups.world.rank, groups.mesh
    for step in range(STEPS):
        if case.resume and step == RESUME_AFTER:
            engine = _resumed(engine, groups, case, clip_norm, step)
        batches = loader.micro_batches(
            step * GLOBAL_BATCH, GLOBAL_BATCH, mesh.coords(rank)["dp"], mesh.dp, case.parts, case.share_of()
        )
        batches = [case.shape_labels(step, batch) for batch in batches]
        looks = []

        def compare_gradients(step=step, engine=engine, looks=looks):
            looks.append(step)
            for name, grad in engine.reducer.gradients().items():
                seen.see_tensor(
                    "grad", step, name, grad, wanted.get(f"{step}/{name}"), engine.reducer.master_specs[name]
                )
            for name, parameter in engine.parameters.items():
                if not parameter.requires_grad:
                    seen.see_tensor("grad", step, name, parameter.grad, None, engine.specs[name])

        result = engine.step(step, batches, case.lr(step), inspect=compare_gradients)
        if len(looks) != 1:
            seen.refuse(step, "grad", f"gradients were shown {len(looks)} times, not once")
        told.append((result.loss, result.grad_norm))
        loss, norm, tokens = scalars[step]
        if result.tokens != tokens:
            seen.refuse(step, "loss", f"tokens: {result.tokens:g} counted, there are {tokens}")
        if tokens == 0:
            if result.loss is not None or result.applied or result.grad_norm != 0:
                seen.refuse(step, "loss", "has no token that counts, and was taken all the same")
        else:
            seen.see_number("loss", step, result.loss, loss)
            seen.see_number("grad_norm", step, result.grad_norm, norm)
    return _end(seen, engine, wanted, told, sum(norm > clip_norm for _, norm, _ in scalars))


def _end(seen: Comparison, engine: Engine, wanted: dict[str, Tensor], told: list, clipped_steps: int) -> Record:
    """Compare what is left when training is over."""
    tensors = engine.reducer.checkpoint_tensors()
    for name, spec in engine.reducer.master_specs.items():
        seen.see_tensor("param", STEPS, name, tensors[name], wanted[f"end/{name}"], spec)
    parameters = named_parameters(engine.model)
    if engine.reducer.gatherer is not None:
        engine.reducer.gatherer.gather_all()
    for name, parameter in parameters.items():
        seen.see_tensor("param", STEPS, name, parameter, wanted[f"end/{name}"], engine.specs[name])
    buffers = dict(engine.model.named_buffers())
    for name, buffer in buffers.items():
        seen.see("param", STEPS, name, 0.0 if torch.equal(buffer, wanted[f"end/{name}"]) else math.inf)
    return Record(
        largest=seen.largest,
        worst=seen.worst,
        first=seen.first,
        shapes={name.removeprefix("end/"): tuple(t.shape) for name, t in wanted.items() if name.startswith("end/")},
        held={name: engine.specs[name].boxes for name in parameters}
        | {name: (Box.whole(tuple(buffer.shape)),) for name, buffer in buffers.items()},
        digests={name: _digest(tensor) for name, tensor in [*parameters.items(), *buffers.items()]},
        told=tuple(told),
        clipped_steps=clipped_steps,
    )


def _digest(tensor: Tensor) -> str:
    memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(memory.numpy(), digest_size=8).hexdigest()


def _engine(groups: Groups, case: Case, clip_norm: float, fresh: int = 0) -> Engine:
    """The trainer's engine; ranks of a "different" start, and those of a resumed run, begin with other values."""
    own = fresh + (groups.world.rank if case.start == "different" else 0)
    model = case.model(SEED + own)
    with torch.no_grad():
        model.frozen.add_(own)
        model.offset.add_(own)
    config = case.config(clip_norm)
    return Engine(parallelize(model, groups, config), groups, config.optim, SEED)


def _resumed(engine: Engine, groups: Groups, case: Case, clip_norm: float, step: int) -> Engine:
    """Save, forget everything, and go on from the checkpoint in an engine that began with other values."""
    control = groups["control"]
    swap = bind_all_gather_object(control)
    root = swap(tempfile.mkdtemp(prefix="minidist-parity-") if control.rank == 0 else None)[0]
    try:
        path = checkpoint.save_checkpoint(root, step, pieces(engine), {}, swap, control.rank)
        engine = _engine(groups, case, clip_norm, fresh=1000)
        prepare(engine, checkpoint.read_index(path))
        checkpoint.load_checkpoint(path, pieces(engine), swap, control.rank)
        engine.reducer.after_load()
    finally:
        swap(None)
        if control.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    return engine
