"""The simple engine equals one process in every layout: gradients before clipping, their norm, losses and parameters.

In float64. The sums of a layout have another order than those of one process, so values differ by some hundred rounding
errors of 1.1e-16 relative to the largest; 1e-11 leaves two orders of magnitude, and every fault is larger than 1e-6.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from minidist.comm import Meter, bind
from minidist.config import (
    CommConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer

BATCH, SEQ, STEPS, SEED = 7, 24, 3, 5
TOLERANCE = 1e-11
MODEL = ModelConfig(
    vocab_size=132, hidden_size=24, intermediate_size=36, num_layers=3, num_heads=12, num_kv_heads=2, max_seq_len=32
)


def make_config(mesh, micro_batches=1, **changes) -> Config:
    model = dataclasses.replace(MODEL, **changes.pop("model", {}))
    return Config(
        model=model,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**changes.pop("parallel", {})),
        zero=ZeroConfig(**changes.pop("zero", {})),
        precision=PrecisionConfig(policy=changes.pop("policy", "fp64")),
        optim=OptimConfig(clip_norm=0.5, weight_decay=0.1, decay="matrices"),
        comm=CommConfig(bucket_mib=0.01, **changes.pop("comm", {})),
        train=TrainConfig(global_batch=BATCH, micro_batches=micro_batches, seed=SEED),
        data=DataConfig(seq_len=SEQ, **changes.pop("data", {})),
        **changes,
    )


def loader():
    return Loader(generate_text(4000), SEQ, 0, min_length=3)


def train_simple(world, config):
    """Train; return each step's loss, norm and gradients, the parameters in the end, and the held-out loss."""
    from minidist.simple.engine import Engine
    from minidist.simple.parallelize import group_specs, parallelize

    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    model = Transformer(config.model)
    init_parameters(model, world.rank)  # replicas start different: rank 0's values count
    parallel = parallelize(model.double(), groups, config)
    engine = Engine(parallel, groups, config)
    coords, rows = mesh.coords(world.rank), []
    weight = config.data.weights[coords["dp"]] if config.data.weights else 1.0
    seen = {}
    agree = engine.squared_norm

    def squared_norm():
        for name, master in engine.reducer.masters.items():
            seen[name] = None if master.grad is None else master.grad.clone()
        return agree()

    engine.squared_norm = squared_norm
    for step in range(STEPS):
        batches = loader().micro_batches(
            step * BATCH, BATCH, coords["dp"], mesh.dp, config.train.micro_batches, config.data.shares
        )
        decision = engine.step(step, batches, 1e-2, weight)
        rows.append((decision.loss, decision.grad_norm, boxes_of(parallel.master_specs, seen)))
    masters = {name: master.detach() for name, master in engine.reducer.masters.items()}
    held_out = engine.evaluate(loader().micro_batches(500, BATCH, coords["dp"], mesh.dp, config.train.micro_batches))
    return rows, boxes_of(parallel.master_specs, masters), held_out


def boxes_of(specs, tensors):
    """Return [(name, box as slices, values)] of all elements that this rank has."""
    found = []
    for name, tensor in tensors.items():
        if tensor is None:
            found.append((name, None, None))
            continue
        sizes = [box.numel for box in specs[name].boxes]
        for box, part in zip(specs[name].boxes, tensor.flatten().split(sizes), strict=True):
            found.append((name, box.slices, part.view(box.shape).clone()))
    return found


def reference(config):
    """The same training in one process, without the package's trainer."""
    model = Transformer(config.model)
    init_parameters(model, 0)
    model.double().train()
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    others = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, (0.9, 0.95), 1e-8)
    rows = []
    dp = config.mesh.dp or 1
    weights = config.data.weights or (1.0,) * dp
    for step in range(STEPS):
        optimizer.zero_grad()
        sums = tokens = 0.0
        for at in range(dp):
            [batch] = loader().micro_batches(step * BATCH, BATCH, at, dp, 1, config.data.shares)
            if len(batch.samples):
                address = DropoutAddress(SEED, step, batch.samples, torch.arange(SEQ))
                loss_sum, count = model(batch.tokens, batch.labels, address=address)
                sums, tokens = sums + weights[at] * loss_sum, tokens + weights[at] * count
        loss = sums / tokens
        loss.backward()
        grads = {name: p.grad.clone() for name, p in named.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rows.append((loss.item(), norm.item(), grads))
    model.eval()
    batch = loader().global_batch(500, BATCH)
    with torch.no_grad():
        loss_sum, count = model(batch.tokens, batch.labels)
    return rows, {name: p.detach() for name, p in named.items()}, (loss_sum / count).item()


def compare(found, expected, what):
    names = set()
    for name, slices, values in found:
        names.add(name)
        right = expected[name][slices]
        difference = (values - right).abs().max().item() if values.numel() else 0.0
        assert difference <= TOLERANCE * max(1.0, right.abs().max().item() if right.numel() else 0), (what, name)
    return names


LAYOUTS = {
    "one rank": ({}, 1, {}),
    "dp2": ({"dp": 2}, 2, {}),
    "dp3 naive": ({"dp": 3}, 2, {"comm": {"gradients": "naive"}}),
    "dp3 doubling": ({"dp": 3}, 2, {"comm": {"gradients": "naive", "algorithm": "doubling"}}),
    "dp4 weights shares": ({"dp": 4}, 2, {"data": {"weights": (1.0, 2.0, 0.5, 1.0), "shares": (1.0, 0.0, 2.0, 1.0)}}),
    "tp2": ({"tp": 2}, 1, {}),
    "tp4": ({"tp": 4}, 2, {}),
    "tp4 sp": ({"tp": 4}, 2, {"parallel": {"sequence": True}}),
    "tp3 sp tied": (
        {"tp": 3},
        1,
        {
            "parallel": {"sequence": True},
            "model": {"tie_embeddings": True, "num_kv_heads": 3, "num_heads": 6, "vocab_size": 129},
            "data": {},
        },
    ),
    "tp2 dp2 sp": ({"tp": 2, "dp": 2}, 1, {"parallel": {"sequence": True}}),
    "pp2": ({"pp": 2}, 3, {}),
    "pp3 gpipe tied": ({"pp": 3}, 4, {"parallel": {"schedule": "gpipe"}, "model": {"tie_embeddings": True}}),
    "pp2 dp2 tied": ({"pp": 2, "dp": 2}, 3, {"model": {"tie_embeddings": True}}),
    "pp2 split": ({"pp": 2}, 3, {"parallel": {"schedule": "zb-h1"}}),
    "pp2 tp2 sp tied": ({"pp": 2, "tp": 2}, 2, {"parallel": {"sequence": True}, "model": {"tie_embeddings": True}}),
    "pp3 tp2 tied": ({"pp": 3, "tp": 2}, 2, {"model": {"tie_embeddings": True}}),
    "cp2": ({"cp": 2}, 1, {}),
    "cp4": ({"cp": 4}, 2, {"data": {}}),
    "cp2 ulysses": ({"cp": 2}, 1, {"parallel": {"context": "ulysses"}}),
    "cp2 tp2 sp": ({"cp": 2, "tp": 2}, 1, {"parallel": {"sequence": True}}),
    "cp2 dp2 dropout": ({"cp": 2, "dp": 2}, 2, {"model": {"dropout": 0.1}}),
    "zero1 dp3": ({"dp": 3}, 2, {"zero": {"stage": 1}}),
    "zero2 dp3": ({"dp": 3}, 2, {"zero": {"stage": 2}}),
    "zero3 dp3": ({"dp": 3}, 2, {"zero": {"stage": 3}}),
    "zero3 dp4 empty": ({"dp": 4}, 2, {"zero": {"stage": 3}, "data": {"shares": (1.0, 0.0, 2.0, 1.0)}}),
    "zero3 dp2 tp2 sp": ({"dp": 2, "tp": 2}, 1, {"zero": {"stage": 3}, "parallel": {"sequence": True}}),
    "zero2 dp2 pp2 tied": ({"dp": 2, "pp": 2}, 3, {"zero": {"stage": 2}, "model": {"tie_embeddings": True}}),
    "zero3 dp2 pp2 recompute": ({"dp": 2, "pp": 2}, 2, {"zero": {"stage": 3}, "recompute": "block"}),
    "zero3 cp2 dp2": ({"cp": 2, "dp": 2}, 1, {"zero": {"stage": 3, "prefetch": False}}),
    "zero1 tp4": ({"tp": 4}, 1, {"zero": {"stage": 1}}),
    "recompute dropout tp2": ({"tp": 2}, 1, {"recompute": "block", "model": {"dropout": 0.1}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(ranks, layout):
    mesh, micro_batches, changes = LAYOUTS[layout]
    config = make_config(mesh, micro_batches, **changes)
    size = 1
    for axis in mesh.values():
        size *= axis
    expected_rows, expected_parameters, expected_held_out = reference(config)
    results = ranks(train_simple, size, config)
    for rows, parameters, held_out in results:
        for step, ((loss, norm, grads), (right_loss, right_norm, right_grads)) in enumerate(
            zip(rows, expected_rows, strict=True)
        ):
            compare(grads, right_grads, f"gradient of step {step}")
            assert norm == pytest.approx(right_norm, rel=TOLERANCE), step
            assert loss == pytest.approx(right_loss, rel=TOLERANCE), step
        compare(parameters, expected_parameters, "parameter")
        assert held_out == pytest.approx(expected_held_out, rel=TOLERANCE)
    covered = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in expected_parameters.items()}
    for _, parameters, _ in results:
        for name, slices, _ in parameters:
            covered[name][slices] = True
    assert all(mask.all() for mask in covered.values())


def test_a_zero_step_enters_at_most_five_files():
    """A reader follows a parameter through a ZeRO-1 step in at most five files of the simple trainer."""
    from minidist.comm import World
    from minidist.simple.engine import Engine
    from minidist.simple.parallelize import group_specs, parallelize

    config = make_config({}, zero={"stage": 1})
    world = World.single()
    mesh = config.mesh_of(1)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    engine = Engine(parallelize(Transformer(config.model).double(), groups, config), groups, config)
    batches = loader().micro_batches(0, BATCH, 0, 1, 1)
    entered = set()

    def collect(frame, event, _):
        if event == "call":
            entered.add(Path(frame.f_code.co_filename))

    sys.setprofile(collect)
    try:
        engine.step(0, batches, 1e-2)
    finally:
        sys.setprofile(None)
    files = sorted(path.name for path in entered if path.parent.name == "simple")
    assert "zero.py" in files
    assert len(files) <= 5, files
