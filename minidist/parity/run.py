"""Run the cases: first what one process does, each in a file; then the trainer on ranks, compared on the spot."""

import json
import math
import shutil
import tempfile
from collections.abc import Sequence

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minidist.comm import Groups, World, bind, exchange
from minidist.fault import checkpoint
from minidist.mesh import Mesh
from minidist.parallelize import USES, parallelize
from minidist.parity import reference
from minidist.parity.cases import GLOBAL_BATCH, RESUME_AFTER, SEED, STEPS, Case
from minidist.parity.compare import Comparison
from minidist.train.state import pieces, prepare
from minidist.train.step import Engine


def run_references(world: World, cases: Sequence[Case], folder: str) -> None:
    """Train each reference in one process, and write its gradients, parameters, losses and norms to a file."""
    for number, case in enumerate(cases):
        model = case.model()
        parameters = [p for p in model.parameters() if p.requires_grad]
        config = case.config().optim
        if case.optimizer == "adamw":
            optimizer = torch.optim.AdamW(
                parameters, case.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
            )
        else:
            optimizer = torch.optim.SGD(parameters, case.lr, weight_decay=config.weight_decay)
        loader = case.loader()
        batches = []
        for step in range(STEPS):
            batch = case.shape_labels(step, loader.global_batch(step * GLOBAL_BATCH, GLOBAL_BATCH))
            batches.append((batch.tokens, batch.labels, batch.samples))
        tensors, scalars = {}, []

        def look(step, loss, norm, grads, tensors=tensors, scalars=scalars):
            scalars.append((loss, norm))
            tensors.update({f"{step}/{name}": grad for name, grad in grads.items() if grad is not None})

        reference.train(model, batches, optimizer, case.clip_norm, SEED, look)
        tensors.update({f"end/{name}": parameter.detach() for name, parameter in model.named_parameters()})
        save_file(tensors, f"{folder}/{number}.safetensors", {"scalars": json.dumps(scalars)})


def _read_reference(file: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as stream:
        scalars = json.loads(stream.metadata()["scalars"])
    return [tuple(pair) for pair in scalars], load_file(file)


def run_cases(world: World, cases: Sequence[tuple[Case, int]], folder: str) -> list[dict]:
    """Run each case on these ranks against its reference (by number); returns this rank's rows."""
    mesh = Mesh(dp=world.size)
    groups = bind(world, mesh, USES)
    return [_run_case(groups, case, f"{folder}/{number}.safetensors") for case, number in cases]


def _engine(groups: Groups, case: Case, fresh: int = 0) -> Engine:
    """The trainer's engine; ranks of a "different" start, and those of a resumed run, begin with values of their own."""
    rank = groups.world.rank
    model = case.model(SEED + fresh + (rank if case.start == "different" else 0))
    if case.start == "different" and rank > 0:
        with torch.no_grad():
            model.frozen.fill_(1 + rank)
            model.offset.fill_(1 + rank)
    return Engine(parallelize(model, groups, case.config()), groups, case.config().optim, SEED)


def _run_case(groups: Groups, case: Case, reference_file: str) -> dict:
    scalars, wanted = _read_reference(reference_file)
    seen, loader = Comparison(case.tolerance), case.loader()
    engine = _engine(groups, case)
    rank, mesh = groups.world.rank, groups.mesh
    for step in range(STEPS):
        if case.resume and step == RESUME_AFTER:
            engine = _resumed(engine, groups, case, step)
        batches = loader.micro_batches(
            step * GLOBAL_BATCH, GLOBAL_BATCH, mesh.coords(rank)["dp"], mesh.dp, case.micro_batches, case.share_of()
        )
        batches = [case.shape_labels(step, batch) for batch in batches]

        def compare_gradients(step=step, engine=engine):
            for name, parameter in engine.parameters.items():
                want = wanted.get(f"{step}/{name}")
                seen.see_tensor("grad", step, name, parameter.grad, want, engine.specs[name])

        result = engine.step(step, batches, case.lr, inspect=compare_gradients)
        loss, norm = scalars[step]
        if math.isnan(loss):
            seen.see("loss", step, "", 0.0 if result.loss is None and not result.applied else math.inf)
            continue
        mine = math.inf if result.loss is None else result.loss
        seen.see("loss", step, "", abs(mine - loss) / abs(loss))
        seen.see("grad_norm", step, "", abs(result.grad_norm - norm) / norm)
    for name, parameter in engine.parameters.items():
        judged = case.dtype == "float64" or case.optimizer == "sgd"
        seen.see_tensor("param", STEPS, name, parameter, wanted[f"end/{name}"], engine.specs[name], judged)
    clipped = sum(norm > case.clip_norm for loss, norm in scalars if not math.isnan(loss))
    return {"largest": seen.largest, "worst": seen.worst, "first": seen.first, "clipped_steps": clipped}


def _resumed(engine: Engine, groups: Groups, case: Case, step: int) -> Engine:
    """Save, forget everything, and go on from the checkpoint in an engine that began with other values."""
    control = groups["control"]
    swap = exchange(control)
    root = swap(tempfile.mkdtemp(prefix="minidist-parity-") if control.rank == 0 else None)[0]
    try:
        path = checkpoint.save(root, step, pieces(engine), {}, swap, control.rank)
        engine = _engine(groups, case, fresh=1000)
        prepare(engine, checkpoint.read_index(path))
        checkpoint.load(path, pieces(engine), swap, control.rank)
    finally:
        swap(None)
        if control.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    return engine


def rows_of(case: Case, by_rank: Sequence[dict]) -> dict:
    """One row of the table from what every rank saw."""
    largest = {kind: max(row["largest"][kind] for row in by_rank) for kind in by_rank[0]["largest"]}
    wrong = [row["first"] for row in by_rank if row["first"] is not None]
    part, worst = max((row["worst"] for row in by_rank), key=lambda pair: pair[0])
    if case.clip and by_rank[0]["clipped_steps"] != 1 and not wrong:
        wrong = [f"clipping was active in {by_rank[0]['clipped_steps']} steps, not in one"]
    return {
        "layout": case.layout,
        "dtype": case.dtype,
        "optimizer": case.optimizer,
        "loss_diff": largest["loss"],
        "grad_diff": largest["grad"],
        "grad_norm_diff": largest["grad_norm"],
        "param_diff": largest["param"],
        "worst_tensor": worst,
        "first_wrong": wrong[0] if wrong else None,
        "tolerance": case.tolerance,
        "ok": not wrong,
    }


def run(server, cases: Sequence[Case], deadline_s: float) -> list[dict]:
    """Run all cases on fresh ranks of the server, in the order given; one row each."""
    references = list(dict.fromkeys(case.reference for case in cases))
    rows: dict[Case, dict] = {}
    with tempfile.TemporaryDirectory(prefix="minidist-parity-") as folder:
        server.run(run_references, 1, (references, folder), backend=None, deadline_s=deadline_s)
        for world in sorted({case.world for case in cases}):
            mine = [case for case in cases if case.world == world]
            numbered = [(case, references.index(case.reference)) for case in mine]
            result = server.run(run_cases, world, (numbered, folder), deadline_s=deadline_s)
            for case, by_rank in zip(mine, zip(*result.values, strict=True), strict=True):
                rows[case] = rows_of(case, by_rank)
    return [rows[case] for case in cases]
