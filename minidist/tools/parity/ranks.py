"""The functions that run on ranks: training the references, one process each, and comparing the trainer with them."""

import hashlib
import json
import math
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minidist.comm import Groups, World, all_gather_object, bind
from minidist.parameters import Box
from minidist.tensor_bytes import tensor_bytes
from minidist.tools.output_files import write_atomically
from minidist.tools.parity import reference
from minidist.tools.parity.cases import CLIPPED_STEP, GLOBAL_BATCH, RESUME_AFTER, SEED, STEPS, Case
from minidist.tools.parity.compare import Comparison, FirstDifference
from minidist.tools.parity.engines import ParityEngine, engine_class
from minidist.tools.parity.muon import CombinedOptimizer, ReferenceMuon


@dataclass(frozen=True)
class RankReport:
    """The result of one parity case on one rank: differences between the trainer and the reference run in one process.

    largest: the largest difference of each kind of value. worst: (difference / tolerance, name) of the tensor where
    that ratio is largest. first: the first difference beyond its tolerance, None if there is none. shapes: the
    unsharded shape of every parameter and buffer, by name. boxes: the index ranges that this rank has of each parameter
    and buffer. digests: hashes of this rank's parameters and buffers at the end, by name. scalars: (loss, gradient
    norm) of each step on this rank; the loss is None without counted tokens. num_reference_clips: the number of steps
    in which the reference run clipped its gradient. calls: the calls that `prepare` of `run_cases` counts, in this case
    alone, by name; None if it counts none.
    """

    largest: dict[str, float]
    worst: tuple[float, str | None]
    first: FirstDifference | None
    shapes: dict[str, tuple[int, ...]]
    boxes: dict[str, tuple[Box, ...]]
    digests: dict[str, str]
    scalars: tuple[tuple[float | None, float], ...]
    num_reference_clips: int
    calls: dict[str, int] | None = None


def report_file(folder: str, number: int, rank: int) -> Path:
    """Return the path to which rank `rank` writes its `RankReport` of case `number`."""
    return Path(folder, f"record-{number}-{rank}.pickle")


def first_difference_file(folder: str, number: int, rank: int) -> Path:
    """Return the path to which rank `rank` writes the first difference that it finds in case `number`."""
    return Path(folder, f"first-{number}-{rank}.pickle")


def _reference_file(folder: str, number: int) -> str:
    """The path of the gradients, parameters, losses and norms of reference `number`."""
    return f"{folder}/reference-{number}.safetensors"


def train_references(world: World, cases: Sequence[Case], folder: str) -> None:
    """Train the reference of each case in one process, and write its gradients, parameters and losses to `folder`.

    The processes of `world` take the cases in turn; they do not communicate.
    """
    for number in range(world.rank, len(cases), world.size):
        _write_reference(cases[number], _reference_file(folder, number))


def _write_reference(case: Case, file: str) -> None:
    """Train a reference in one process and write its results."""
    model = case.make_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    config = case.config().optim
    adamw = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, **adamw)
    elif case.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=config.momentum, weight_decay=config.weight_decay)
    else:
        layers = {p for p in model.model.layers.parameters() if p.dim() == 2}
        muon = ReferenceMuon(list(layers), config.muon_momentum, config.weight_decay)
        optimizer = CombinedOptimizer(muon, torch.optim.AdamW([p for p in parameters if p not in layers], **adamw))
    loader = case.make_loader()
    batches = []
    for step in range(STEPS):
        batch = case.adjust_labels(step, loader.global_batch(step * GLOBAL_BATCH, GLOBAL_BATCH))
        batches.append((batch.tokens, batch.labels, batch.samples))
    tensors: dict[str, Tensor] = {}
    scalars: list[tuple[float | None, float, int]] = []

    def record_step(step: int, loss: float | None, norm: float, tokens: int, grads: dict[str, Tensor | None]) -> None:
        scalars.append((loss, norm, tokens))
        tensors.update({f"{step}/{name}": grad for name, grad in grads.items() if grad is not None})

    lrs = [case.lr(step) for step in range(STEPS)]
    clip_norm = _choose_clip_norm(case, batches) if case.clip else math.inf
    reference.train_reference(model, batches, optimizer, lrs, clip_norm, SEED, record_step)
    tensors.update({f"end/{name}": tensor.detach() for name, tensor in model.named_parameters()})
    tensors.update({f"end/{name}": tensor for name, tensor in model.named_buffers()})
    save_file(tensors, file, {"scalars": json.dumps(scalars), "clip_norm": json.dumps(clip_norm)})


def _choose_clip_norm(case: Case, batches: Sequence) -> float:
    """Return a norm that the step with the large gradient exceeds and no other: half-way to the step before."""
    norms: list[float] = []
    model = case.make_model()
    still = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    steps = CLIPPED_STEP + 1
    reference.train_reference(
        model, batches[:steps], still, [0.0] * steps, math.inf, SEED, lambda *seen: norms.append(seen[2])
    )
    return sum(norms[-2:]) / 2


def _read_reference_run(file: str) -> tuple[list[tuple[float | None, float, int]], dict[str, Tensor], float]:
    """Read a `_reference_file`: (loss, gradient norm before clipping, number of tokens) of each step, the tensors by
    name, and the norm to which gradients are clipped.

    The tensors are gradients, named `STEP/NAME`, and parameters and buffers at the end, named `end/NAME`.
    """
    with safe_open(file, framework="pt") as stream:
        about = {key: json.loads(text) for key, text in stream.metadata().items()}
    return [tuple(row) for row in about["scalars"]], load_file(file), about["clip_norm"]


def run_cases(
    world: World, cases: Sequence[tuple[int, Case, int]], folder: str, prepare: Callable[[], object] | None = None
) -> None:
    """Collective: train each case on these ranks, one after the other, and write this rank's report of each.

    cases: (number, case, number of its reference). folder: contains the references; the reports are written there.
    prepare: called first. If it returns a Counter that it goes on counting with, each report has the counts of its
    case.
    """
    counted = None if prepare is None else prepare()
    calls = counted if isinstance(counted, Counter) else None
    groups: Groups | None = None
    for number, case, reference_number in cases:
        mesh = case.mesh_layout.mesh
        specs = engine_class(case.engine).group_specs(mesh, case.config())
        if groups is None or (groups.mesh, groups.specs) != (mesh, tuple(specs)):
            if groups is not None:
                groups.destroy()
            groups = bind(world, mesh, specs)
        on_first = partial(_write_pickle, first_difference_file(folder, number, world.rank))
        if calls is not None:
            calls.clear()
        report = run_case(groups, case, _reference_file(folder, reference_number), on_first)
        report = replace(report, calls=None if calls is None else dict(calls))
        _write_pickle(report_file(folder, number, world.rank), report)


def _write_pickle(file: Path, what: object) -> None:
    """Pickle an object to a file, atomically."""
    write_atomically(file, pickle.dumps(what))


def run_case(groups: Groups, case: Case, file: str, on_first: Callable[[FirstDifference], None]) -> RankReport:
    """Collective: train one case and compare this rank's gradients, losses and parameters with the reference.

    Gradients, loss and gradient norm are compared in every step, parameters at the end; parameters alone if each rank
    has gradients of its own (`Case.has_own_gradients`). file: the reference run, as
    `train_references` wrote it. on_first: called with the first difference beyond its tolerance as soon as it is found.
    """
    scalars, expected, clip_norm = _read_reference_run(file)
    comparison, loader, scalars_seen = Comparison(case.tolerance, on_first=on_first), case.make_loader(), []
    engine = _make_engine(groups, case, clip_norm)
    rank, mesh = groups.world.rank, groups.mesh
    for step in range(STEPS):
        if case.resume and step == RESUME_AFTER:
            engine = _resume_engine(engine, groups, case, clip_norm, step)
        batches = loader.micro_batches(
            step * GLOBAL_BATCH,
            GLOBAL_BATCH,
            mesh.coords(rank)["dp"],
            mesh.dp,
            case.num_micro_batches,
            case.batch_shares(),
        )
        batches = [case.adjust_labels(step, batch) for batch in batches]
        calls = []

        def compare_gradients(step=step, engine=engine, calls=calls):
            calls.append(step)
            for name, grad in engine.gradients().items():
                spec = engine.master_specs[name]
                comparison.compare_tensor("grad", step, name, grad, expected.get(f"{step}/{name}"), spec)
            for name, parameter in engine.parameters.items():
                if not parameter.requires_grad:
                    comparison.compare_tensor("grad", step, name, parameter.grad, None, engine.specs[name])

        loss, norm, tokens = scalars[step]
        if case.has_own_gradients:
            engine.step(step, batches, case.lr(step), global_tokens=tokens)
            continue
        result = engine.step(step, batches, case.lr(step), on_gradients_reduced=compare_gradients)
        if len(calls) != 1:
            comparison.record_failure(step, "grad", f"inspect was called {len(calls)} times, not once")
        scalars_seen.append((result.loss, result.grad_norm))
        if result.num_tokens != tokens:
            comparison.record_failure(step, "loss", f"token count {result.num_tokens:g}, expected {tokens}")
        if tokens == 0:
            if result.loss is not None or result.update_successful or result.grad_norm != 0:
                comparison.record_failure(step, "loss", "without counted tokens, and the update was applied")
        else:
            comparison.compare_scalar("loss", step, result.loss, loss)
            comparison.compare_scalar("grad_norm", step, result.grad_norm, norm)
    return _make_report(comparison, engine, expected, scalars_seen, sum(norm > clip_norm for _, norm, _ in scalars))


def _make_report(
    comparison: Comparison,
    engine: ParityEngine,
    expected: dict[str, Tensor],
    scalars_seen: list,
    num_reference_clips: int,
) -> RankReport:
    """Compare parameters and buffers at the end of training, and make the report."""
    tensors = engine.masters()
    for name, spec in engine.master_specs.items():
        comparison.compare_tensor("param", STEPS, name, tensors[name], expected[f"end/{name}"], spec)
    parameters = engine.parameters
    engine.gather_parameters()
    for name, parameter in parameters.items():
        comparison.compare_tensor("param", STEPS, name, parameter, expected[f"end/{name}"], engine.specs[name])
    buffers = dict(engine.model.named_buffers())
    for name, buffer in buffers.items():
        comparison.add_difference(
            "param", STEPS, name, 0.0 if torch.equal(buffer, expected[f"end/{name}"]) else math.inf
        )
    return RankReport(
        largest=comparison.largest,
        worst=comparison.worst,
        first=comparison.first,
        shapes={name.removeprefix("end/"): tuple(t.shape) for name, t in expected.items() if name.startswith("end/")},
        boxes={name: engine.specs[name].boxes for name in parameters}
        | {name: (Box.whole(tuple(buffer.shape)),) for name, buffer in buffers.items()},
        digests={name: _hash_bytes(tensor) for name, tensor in [*parameters.items(), *buffers.items()]},
        scalars=tuple(scalars_seen),
        num_reference_clips=num_reference_clips,
    )


def _hash_bytes(tensor: Tensor) -> str:
    """Return a hash of the tensor's bytes, as hexadecimal text."""
    return hashlib.blake2b(tensor_bytes(tensor.cpu()).numpy(), digest_size=8).hexdigest()


def _make_engine(groups: Groups, case: Case, clip_norm: float, seed_offset: int = 0) -> ParityEngine:
    """Make the engine of a case; parameters start from another seed on ranks that must differ, and in a resumed run."""
    own = seed_offset + (groups.world.rank if case.start == "different" else 0)
    model = case.make_model(SEED + own)
    with torch.no_grad():
        model.frozen.add_(own)
        model.offset.add_(own)
    return engine_class(case.engine)(model, groups, case.config(clip_norm))


def _resume_engine(engine: ParityEngine, groups: Groups, case: Case, clip_norm: float, step: int) -> ParityEngine:
    """Save a checkpoint and load it into a new engine that was initialised with other values."""
    control = groups["control"]
    root = all_gather_object(tempfile.mkdtemp(prefix="minidist-parity-") if control.rank == 0 else None, control)[0]
    try:
        path = engine.save(root, step)
        engine = _make_engine(groups, case, clip_norm, seed_offset=1000)
        engine.load(path)
    finally:
        all_gather_object(None, control)
        if control.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    return engine
