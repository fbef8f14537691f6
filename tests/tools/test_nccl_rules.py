"""All layouts obey NCCL's rules according to their logs, and the checker finds every kind of violation."""

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, P2POp, World, bind
from minidist.data.loader import Loader
from minidist.data.synthetic import generate_text
from minidist.mesh import Mesh
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.deadlock.nccl_rules import find_nccl_violations
from minidist.tools.parity.cases import SWITCHES, Case
from minidist.tools.parity.layouts import Layout, list_layouts
from minidist.train.engine import Engine
from tests.helpers.exhaustive import exhaustive

PLAIN = {name: values[0] for name, values in SWITCHES.items()}


def record_training(world: World, layout: Layout, gradients: str, micro_batches: int) -> list:
    """The records of the start, of two training steps and of an evaluation."""
    values = PLAIN | {"gradients": gradients, "micro_batches": micro_batches}
    case = Case(world.size, max(2, layout.pp * layout.chunks_per_stage), layout, **values)
    config = case.config()
    groups = bind(world, layout.mesh, group_specs(layout.mesh, config), meter=Meter())
    engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
    loader, at, dp = Loader(generate_text(2000), case.seq_len, seed=1), layout.mesh.coords(world.rank)["dp"], layout.dp
    for step in range(2):
        engine.step(step, loader.micro_batches(step * 13, 13, at, dp, case.num_micro_batches), lr=0.1)
    engine.evaluate(loader.micro_batches(0, 13, at, dp, 2))
    groups.destroy()
    return groups.meter.records


@pytest.mark.parametrize("gradients, micro_batches", [("bucketed", 1), ("bucketed", 4), ("naive", 2)])
@pytest.mark.parametrize("size", [2, *exhaustive(4)])
def test_data_parallelism_obeys_the_rules(ranks, size, gradients, micro_batches):
    logs = dict(enumerate(ranks(record_training, size, Layout(dp=size), gradients, micro_batches)))
    assert all(len(log) > 20 for log in logs.values())
    assert find_nccl_violations(logs) == []


def many(world: World, chosen: list[Layout]) -> list:
    return [record_training(world, layout, "bucketed", 4) for layout in chosen]


@pytest.mark.parametrize("size", [2, *exhaustive(4)])
def test_every_layout_obeys_the_rules(ranks, size):
    chosen = [layout for layout in list_layouts(size) if layout != Layout(dp=size)]
    by_rank = ranks(many, size, chosen)
    assert len(chosen) == {2: 10, 4: 48}[size]
    for number, layout in enumerate(chosen):
        logs = {rank: logs[number] for rank, logs in enumerate(by_rank)}
        assert all(len(log) > 20 for log in logs.values()), layout
        assert find_nccl_violations(logs) == [], layout


def disorderly(world: World) -> list:
    groups = bind(world, Mesh(dp=2), [GroupSpec("a", ("dp",)), GroupSpec("b", ("dp",))], meter=Meter())
    uses = ("a", "b") if world.rank == 0 else ("b", "a")
    handles = [comm.all_reduce(torch.ones(1), groups[use], async_op=True) for use in uses]
    for handle in handles:  # gloo forgives it
        handle.wait()
    return groups.meter.records


def test_groups_used_in_another_order_are_found(ranks):
    assert find_nccl_violations(dict(enumerate(ranks(disorderly, 2)))) == [
        "rank 0: all_reduce #1 of 'a' would not end if operations ran one after the other, in the order of launch",
        "rank 1: all_reduce #1 of 'b' would not end if operations ran one after the other, in the order of launch",
    ]


def transfers(world: World, how: str) -> list:
    group = bind(world, Mesh(dp=2), meter=Meter())["control"]
    peer = 1 - world.rank
    mine, theirs = torch.ones(3), torch.empty(3)
    if how == "batched":
        comm.batch_send_recv([P2POp("send", mine, peer), P2POp("recv", theirs, peer)], group)
        comm.batch_send_recv([P2POp("recv", theirs, peer), P2POp("send", mine, peer)], group)
        return group.meter.records
    sends_first = how == "head to head" or world.rank == 0
    calls = [(comm.send, mine), (comm.recv, theirs)]
    handles = [call(tensor, peer, group, async_op=True) for call, tensor in (calls if sends_first else calls[::-1])]
    for handle in handles:
        handle.wait()
    return group.meter.records


def test_transfers_head_to_head_must_be_batched_or_have_one_order(ranks):
    assert find_nccl_violations(dict(enumerate(ranks(transfers, 2, "batched")))) == []
    assert find_nccl_violations(dict(enumerate(ranks(transfers, 2, "one order")))) == []
    lines = find_nccl_violations(dict(enumerate(ranks(transfers, 2, "head to head"))))
    assert [line.split(" would")[0] for line in lines] == [
        "rank 0: send #1 with rank 1 of 'control'",
        "rank 1: send #1 with rank 0 of 'control'",
    ]


def log(*devices: str) -> list:
    meter = Meter()
    for seq, device in enumerate(devices, 1):
        meter.record("all_reduce", "a", (0, 1), 0, seq, (4,), torch.float32, device=device)
    return meter.records


def test_a_rank_has_one_device_and_shares_no_gpu():
    assert find_nccl_violations({0: log("cuda:0"), 1: log("cuda:1")}) == []
    assert find_nccl_violations({0: log("cpu"), 1: log("cpu")}) == []
    assert find_nccl_violations({0: log("cuda:0"), 1: log("cuda:0")}) == ["ranks 0 and 1 share cuda:0"]
    assert find_nccl_violations({0: log("cuda:0"), 1: log("cuda:0")}, node_by_rank={0: 0, 1: 1}) == []
    assert find_nccl_violations({0: log("cuda:0", "cuda:1"), 1: log("cpu", "cpu")}) == [
        "rank 0 sends from several devices: cuda:0, cuda:1"
    ]


def test_a_missing_operation_is_found():
    (line,) = find_nccl_violations({0: log("cpu", "cpu"), 1: log("cpu")})
    assert line.startswith("rank 0: all_reduce #2 of 'a' would not end")
