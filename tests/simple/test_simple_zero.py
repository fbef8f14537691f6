"""The memory that each ZeRO stage of the simple trainer saves; its updates against those of torch's own sharding."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from exercises.zero_run import ADAMW, FullyShardedReplica, Net, batches, loss_of
from minidist.comm import GroupSpec, bind
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.simple.zero import ZeroStage1, ZeroStage2, ZeroStage3
from tests.helpers.small_run import small_config, with_changes

MODEL = ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)


def count_after_a_step(world, configs):
    """For each configuration: elements of this rank's Adam moments, bytes of its full parameters, number of flat
    parameters."""
    from minidist.simple.engine import Engine
    from minidist.simple.parallelize import group_specs, parallelize

    found = []
    for config in configs:
        mesh = config.mesh_of(world.size)
        groups = bind(world, mesh, group_specs(mesh, config))
        model = Transformer(config.model)
        init_parameters(model, 0)
        engine = Engine(parallelize(model, groups, config), groups, config)
        engine.step(0, Loader(generate_text(400), 8, 0).micro_batches(0, 4, world.rank, world.size, 1), 1e-3)
        moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().size() for p in engine.model.parameters()}
        found.append((moments, sum(storages.values())))
    return found


@pytest.fixture
def configs(tmp_path):
    config = small_config(tmp_path, tmp_path, mesh__dp=2, optim__kind="adamw", train__micro_batches=1, model=MODEL)
    return [with_changes(config, zero__stage=stage) for stage in (1, 2, 3)]


def test_each_rank_has_its_share_of_the_states(ranks, configs):
    num_parameters = sum(parameter.numel() for parameter in Transformer(MODEL).parameters())
    by_rank = ranks(count_after_a_step, 2, configs)
    for stage, counts in enumerate(zip(*by_rank, strict=True), start=1):
        assert [moments for moments, _ in counts] == [num_parameters // 2] * 2, stage
        assert all((size == 0) == (stage == 3) for _, size in counts), stage


class EqualReplica(FullyShardedReplica):
    """A model under any stage, which starts from the same values on all ranks."""

    starts_equal = True


def train_with_torch(world, kind: str) -> dict[str, torch.Tensor]:
    """Return the parameters after three steps with FSDP2, or with DDP and ZeroRedundancyOptimizer."""
    model = Net(0)
    if kind == "FSDP2":
        mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    else:
        model.never.requires_grad = model.rare.requires_grad = False  # DDP would give them gradients of zero
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        [data] = batches(step, world.rank, world.size, 1)
        (world.size * loss_of(wrapped, data)).backward()  # both take the mean over the ranks
        optimizer.step()
    full = {name: p.full_tensor() if kind == "FSDP2" else p for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in full.items()}


def train_all_ways(world) -> dict[str, dict[str, torch.Tensor]]:
    results = {kind: train_with_torch(world, kind) for kind in ("FSDP2", "ZeroRedundancyOptimizer")}
    group = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))])["grads"]
    for stage in (ZeroStage1, ZeroStage2, ZeroStage3):
        mine = EqualReplica(stage, group)
        for step in range(3):
            mine.train(step, 1)
        for flat in mine.zero.flat_params:
            flat.start_gather()
            flat.wait()
        results[stage.__name__] = {name: p.detach().clone() for name, p in mine.model.named_parameters()}
    return results


def test_all_stages_train_as_torchs_own(ranks):
    for results in ranks(train_all_ways, 2):
        for other in ("FSDP2", "ZeroRedundancyOptimizer"):
            for stage in ("ZeroStage1", "ZeroStage2", "ZeroStage3"):
                for name, value in results[stage].items():
                    # Sums in another order: 1e-14 of their size, times at most lr / eps = 20 in AdamW.
                    torch.testing.assert_close(value, results[other][name], rtol=1e-11, atol=1e-12)
