"""Exchange of sharded matrices: owners get full matrices, ranks get their shards of the results, without padding."""

import pytest
import torch

from minidist.comm import GroupSpec, Meter, bind
from minidist.config import Config, MeshConfig, OptimConfig, PrecisionConfig, TrainConfig, ZeroConfig
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.parameters import Box, ParamSpec, flat_boxes
from minidist.tools.estimate.estimate import estimate
from minidist.tools.estimate.traffic import count_elements_sent_by_muon
from minidist.train.matrix_exchange import ShardedMatrices
from minidist.train.matrix_plan import MatrixShard, assign_matrix_owners
from tests.helpers.exhaustive import exhaustive

SHAPES = {"a": (5, 3), "b": (2, 7), "c": (4, 4)}


def make_matrix(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(ord(name)), dtype=torch.float64)


def exchange_differences(world, replicated: bool) -> dict[str, torch.Tensor]:
    """Matrices cut flat over the ranks (c replicated, if asked), through a function of the full matrix and back."""
    mesh = Mesh(dp=world.size)
    group = bind(world, mesh, [GroupSpec("matrices", ("dp",))], meter=Meter())["matrices"]
    specs = {}
    for name, shape in SHAPES.items():
        numel = shape[0] * shape[1]
        ends = [rank * numel // world.size for rank in range(world.size + 1)]
        boxes = tuple(flat_boxes(shape, ends[world.rank], ends[world.rank + 1]))
        if name == "c" and replicated:
            boxes = (Box.whole(shape),)
        if boxes:
            specs[name] = ParamSpec(name, shape, boxes, (world.rank,))
    exchange = ShardedMatrices(specs, group, torch.float64)

    def local(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat([tensor[box.slices].reshape(-1) for box in specs[name].boxes])

    names = {"a", "c"}  # b has no gradient
    shards = {name: local(make_matrix(name), name) for name in specs if name in names}
    results = exchange.apply(lambda full: full @ full.T @ full, shards, names)
    assert results.keys() == shards.keys()
    return {name: (found - local(full @ full.T @ full, name)).abs().max().item()
            for name, found in results.items() for full in [make_matrix(name)]}  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("replicated", [False, True])
def test_every_rank_gets_its_shard_of_the_full_matrix_result(ranks, world, replicated):
    for differences in ranks(exchange_differences, world, replicated):
        assert all(value < 1e-12 for value in differences.values())


def test_owners_share_the_work_equally_and_send_each_shard_once():
    shards = [{f"m{i}": MatrixShard(rank, 10) for i in range(8)} for rank in range(4)]
    plan = assign_matrix_owners(shards)
    assert sorted(plan.owner_by_matrix.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    # Two of eight matrices are a rank's own: it sends shards of six, and of its two an update to three ranks.
    assert [count_elements_sent_by_muon(plan, rank) for rank in range(4)] == [(60, 60)] * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks_", [8, *exhaustive(64)])
def test_muon_memory_under_zero_matches_its_formula(stage, ranks_):
    """0.79 billion parameters: bytes of model states within 3 % of the sum over parameters, on every rank."""
    model = ModelConfig(
        vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_layers=24, num_heads=16, num_kv_heads=16
    )
    found = {}
    for kind in ("muon", "adamw"):
        config = Config(
            model=model,
            mesh=MeshConfig(dp=ranks_),
            train=TrainConfig(global_batch=64),
            zero=ZeroConfig(stage=stage),
            optim=OptimConfig(kind=kind),
            precision=PrecisionConfig(policy="bf16"),
        )
        found[kind] = max(cost.model_state_bytes for cost in estimate(config, ranks_).ranks)
    n = 24 * (4 * 1536**2 + 3 * 1536 * 4096 + 2 * 1536) + 32000 * 1536 + 1536
    hidden = 24 * (4 * 1536**2 + 3 * 1536 * 4096)
    parameters, gradients = 2 * n / (ranks_ if stage == 3 else 1), 4 * n / (1 if stage == 1 else ranks_)
    formula = parameters + gradients + (4 * n + 4 * hidden + 8 * (n - hidden)) / ranks_
    assert found["muon"] == pytest.approx(formula, rel=0.03)
    assert found["muon"] < found["adamw"]
