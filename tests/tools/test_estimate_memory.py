"""Estimated peak memory against steps of real engines, in total and by category."""

import dataclasses
import sys

import pytest
import torch

from minidist.comm import World, barrier, bind
from minidist.config import (
    CommConfig,
    Config,
    ConsistencyConfig,
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
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.estimate.estimate import MEMORY_KINDS, estimate
from minidist.tools.memory.breakdown import make_engine_tensor_lister, measure_peak
from minidist.train.engine import Engine

# Large enough that logits, gathered flat parameters and flat gradients matter, small enough for a fast step.
MODEL = ModelConfig(
    vocab_size=160, hidden_size=48, intermediate_size=112, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=64
)
TOTAL, KIND, MOST_BUFFERS = 0.05, 0.10, 0.30  # within which they agree


def configured(
    stage=0, policy="fp32", k=1, batch=8, recompute="none", engine="fast", model=None, mesh=None, how=None, **more
) -> Config:
    return Config(
        model=dataclasses.replace(MODEL, **(model or {})),
        data=DataConfig(seq_len=32),
        mesh=MeshConfig(**(mesh or {})),
        parallel=ParallelConfig(**(how or {})),
        zero=ZeroConfig(stage=stage, **more.pop("zero", {})),
        precision=PrecisionConfig(policy=policy, **more.pop("precision", {})),
        optim=OptimConfig(**more.pop("optim", {})),
        comm=CommConfig(**more.pop("comm", {})),
        consistency=ConsistencyConfig(**more.pop("consistency", {})),
        train=TrainConfig(global_batch=batch, micro_batches=k),
        recompute=recompute,
        engine=engine,
    )


def steps_of(world: World, config: Config):
    torch.set_num_threads(1)
    mesh, train = config.mesh_of(world.size), config.train
    groups = bind(world, mesh, group_specs(mesh, config))
    model = Transformer(config.model)
    init_parameters(model, 0)
    engine = Engine(parallelize(model, groups, config), groups, config.optim, seed=1)
    loader, at = Loader(generate_text(20_000), config.data.seq_len, 0), mesh.coords(world.rank)["dp"]

    def step(number: int):
        mine = loader.micro_batches(number * train.global_batch, train.global_batch, at, mesh.dp, train.micro_batches)
        return lambda: engine.step(number, mine, 1e-2)

    return engine, step


def peaks(world: World, configs: list[Config], steps: int = 1) -> list:
    """The peak memory on this rank of one step of each configuration, after some steps."""
    results = []
    for config in configs:
        engine, step = steps_of(world, config)
        for number in range(steps):
            step(number)()
        results.append(measure_peak(step(steps), make_engine_tensor_lister(engine)))
        barrier(engine.groups["control"])  # a rank that has ended shares its pages with nobody
        engine.groups.destroy()
    return results


GRID = {
    1: [
        configured(),
        configured(policy="bf16", model={"tie_embeddings": False}),
        configured(stage=3, k=4),
        configured(recompute="block", model={"dropout": 0.1}),
        configured(policy="fp16", recompute="block", stage=2),
        configured(batch=1, model={"vocab_size": 640}),  # where the ends of the model are most
        configured(batch=1, optim={"kind": "muon"}, k=1),  # where the update is
    ],
    2: [
        configured(consistency={"mode": "diloco", "h": 1}),
        configured(batch=2, consistency={"mode": "diloco", "h": 1}, model={"vocab_size": 640}),  # where the merge is
        configured(batch=2, consistency={"mode": "diloco", "h": 1, "exchange": "int8"}, model={"vocab_size": 640}),
        configured(batch=2, consistency={"mode": "local", "h": 1}, model={"vocab_size": 640}),
        configured(stage=1, policy="bf16", precision={"reduce": "bf16"}),
        configured(stage=2, k=4),
        configured(stage=3, model={"tie_embeddings": False}),
        configured(stage=3, policy="bf16", recompute="block"),
        configured(stage=2, recompute="block", k=4),
        configured(comm={"gradients": "naive"}),
        configured(mesh={"tp": 2}),
        configured(mesh={"tp": 2}, how={"sequence": True}, policy="bf16", model={"dropout": 0.1}),
        configured(mesh={"cp": 2}),
        configured(mesh={"pp": 2}, k=4),
        configured(mesh={"pp": 2}, k=4, how={"schedule": "zb-h1"}, model={"tie_embeddings": False}),
        configured(mesh={"pp": 2}, k=4, recompute="block", policy="bf16"),
    ],
    4: [
        configured(stage=3),
        configured(stage=1, policy="bf16", consistency={"mode": "diloco", "h": 1, "replicas": 2}),
        configured(stage=2, policy="bf16", k=2),
        configured(mesh={"pp": 2, "tp": 2}, k=4, how={"sequence": True}),
        configured(mesh={"tp": 2}, stage=1, recompute="block"),
    ],
}


@pytest.mark.parametrize("world", GRID)
def test_peak_memory_by_category_matches_real_steps(ranks, world):
    message = [estimate(config, world).ranks for config in GRID[world]]
    for rank, found in enumerate(ranks(peaks, world, GRID[world])):
        for number, peak in enumerate(found):
            cost, where = message[number][rank], (GRID[world][number], rank)
            assert (
                cost.peak_memory_bytes == sum(cost.peak_breakdown.values()) == pytest.approx(peak.total, rel=TOTAL)
            ), where
            for name, kind in MEMORY_KINDS.items():
                # Two moments may be as high: then parts of one are those of the other but for a little of the whole.
                part, little = peak.breakdown.get(kind, 0), TOTAL * peak.total
                assert abs(cost.peak_breakdown[kind] - part) <= KIND * part + little, (
                    kind,
                    cost.peak_breakdown[kind],
                    part,
                    where,
                )
                most = pytest.approx(peak.peak_by_kind.get(kind, 0), rel=MOST_BUFFERS if kind == "buffers" else KIND)
                assert getattr(cost, name) == most, (kind, where)


def test_model_states_are_estimated_exactly(ranks):
    for world in (1, 2):
        for rank, found in enumerate(ranks(peaks, world, GRID[world][:3])):
            for peak, config in zip(found, GRID[world], strict=False):
                cost = estimate(config, world).ranks[rank]
                stays = {"parameter_bytes": "parameters", "master_bytes": "masters", "optimizer_bytes": "states"}
                for name, kind in (stays | {"gradient_bytes": "gradients"}).items():
                    assert getattr(cost, name) == cost.peak_breakdown[kind] or kind == "gradients"
                    assert getattr(cost, name) == peak.peak_by_kind.get(kind, 0), (kind, config)


def test_gradient_shards_exist_only_after_backward():
    """At the end of forward none is; with several micro-batches all are, from the first one on."""
    one, many = (estimate(configured(stage=3, k=k), 2).ranks[0] for k in (1, 4))
    assert one.peak_breakdown["gradients"] == 0 < one.gradient_bytes == many.peak_breakdown["gradients"]


def test_without_zero_and_a_pipeline_the_peak_is_at_the_loss():
    """By hand: two gradients as large as the logits, of probabilities and of logits themselves."""
    (cost,) = estimate(configured(), 1).ranks
    assert cost.peak_breakdown["buffers"] == 2 * 8 * 32 * MODEL.vocab_size * 4
    (narrow,) = estimate(configured(policy="bf16"), 1).ranks
    assert narrow.peak_breakdown["buffers"] == cost.peak_breakdown["buffers"]  # it is computed in 32 bits all the same


# -- shared memory ----------------------------------------------------------------------------------------------------

MAPPED = [
    (2, configured()),
    (2, configured(stage=3)),
    (2, configured(mesh={"pp": 2}, k=2, batch=16)),
    (4, configured(stage=2)),
]


@pytest.mark.skipif(sys.platform != "linux", reason="the backend shm, and its pages in /proc")
@pytest.mark.parametrize(("world", "config"), MAPPED)
def test_mapped_segments_match_the_pages_that_ranks_touched(ranks, world, config):
    found = [each.shared_segments for (each,) in ranks(peaks, world, [config], 3)]
    message = [cost.shared_segment_bytes for cost in estimate(config, world).ranks]
    # Whose part of a shared page is counted how depends on who has it mapped at the time, but their sum does not.
    assert sum(message) == pytest.approx(sum(found), rel=0.15), (message, found)


def test_over_other_backends_and_alone_nothing_is_mapped():
    assert all(not cost.shared_segment_bytes for cost in estimate(configured(comm={"backend": "gloo"}), 2).ranks)
    assert all(cost.shared_segment_bytes for cost in estimate(configured(), 2).ranks)
    assert not estimate(configured(), 1).ranks[0].shared_segment_bytes
    cuda = dataclasses.replace(configured(), device="cuda")
    assert not estimate(cuda, 2).ranks[0].shared_segment_bytes
