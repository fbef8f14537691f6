"""The layouts obey the rules of NCCL, by their own logs; and the checker sees each way to break one."""

import pytest
import torch

from minidist import comm
from minidist.comm import Meter, Transfer, Use, World, bind
from minidist.comm.rules import violations
from minidist.config import CommConfig, Config
from minidist.data.loader import Loader
from minidist.data.synthetic import generate
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.transformer import Transformer
from minidist.parallelize import USES, parallelize
from minidist.train.step import Engine

TINY = ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2)


def training(world: World, gradients: str, micro_batches: int) -> list:
    """The records of a start, two training steps and an evaluation."""
    config = Config(model=TINY, comm=CommConfig(gradients=gradients, bucket_mib=0.01))
    groups = bind(world, Mesh(dp=world.size), USES, meter=Meter())
    engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
    loader = Loader(generate(2000), seq_len=8, seed=1)
    for step in range(2):
        engine.step(step, loader.micro_batches(step * 13, 13, world.rank, world.size, micro_batches), lr=0.1)
    engine.evaluate(loader.micro_batches(0, 13, world.rank, world.size, 1))
    return groups.meter.records


@pytest.mark.parametrize("gradients, micro_batches", [("bucketed", 1), ("bucketed", 4), ("naive", 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_obeys_the_rules(ranks, size, gradients, micro_batches):
    logs = dict(enumerate(ranks(training, size, gradients, micro_batches)))
    assert all(len(log) > 20 for log in logs.values())
    assert violations(logs) == []


def disorderly(world: World) -> list:
    groups = bind(world, Mesh(dp=2), [Use("a", ("dp",)), Use("b", ("dp",))], meter=Meter())
    uses = ("a", "b") if world.rank == 0 else ("b", "a")
    handles = [comm.all_reduce(torch.ones(1), groups[use], async_op=True) for use in uses]
    for handle in handles:  # gloo forgives it
        handle.wait()
    return groups.meter.records


def test_groups_used_in_another_order_are_found(ranks):
    (line,) = violations(dict(enumerate(ranks(disorderly, 2))))
    assert line.startswith("ranks 0 and 1: operation 0 on shared groups is all_reduce #1 of 'a' on one")


def unbatched(world: World, together: bool) -> list:
    group = bind(world, Mesh(dp=2), meter=Meter())["control"]
    peer = 1 - world.rank
    mine, theirs = torch.ones(3), torch.empty(3)
    if together:
        comm.batch([Transfer("send", mine, peer), Transfer("recv", theirs, peer)], group)
        comm.batch([Transfer("send", mine, peer), Transfer("recv", theirs, peer)], group)
    else:
        handle = comm.send(mine, peer, group, async_op=True)
        comm.recv(theirs, peer, group)
        handle.wait()
    return group.meter.records


def test_transfers_in_flight_together_must_be_batched(ranks):
    assert violations(dict(enumerate(ranks(unbatched, 2, True)))) == []
    lines = violations(dict(enumerate(ranks(unbatched, 2, False))))
    assert len(lines) == 2 and "recv #1 with rank 1 was launched while send #1 with rank 1 was in flight" in lines[0]


def log(*devices: str) -> list:
    meter = Meter()
    for seq, device in enumerate(devices, 1):
        meter.record("all_reduce", "a", (0, 1), 0, seq, (4,), torch.float32, device=device)
    return meter.records


def test_a_rank_has_one_device_and_shares_no_gpu():
    assert violations({0: log("cuda:0"), 1: log("cuda:1")}) == []
    assert violations({0: log("cpu"), 1: log("cpu")}) == []
    assert violations({0: log("cuda:0"), 1: log("cuda:0")}) == ["ranks 0 and 1 share cuda:0"]
    assert violations({0: log("cuda:0"), 1: log("cuda:0")}, nodes={0: 0, 1: 1}) == []
    assert violations({0: log("cuda:0", "cuda:1")}) == ["rank 0 sends from several devices: cuda:0, cuda:1"]


def test_a_missing_operation_is_found():
    assert violations({0: log("cpu", "cpu"), 1: log("cpu")}) == [
        "ranks 0 and 1: 2 and 1 operations on the groups they share"
    ]
