"""GPU tensors over shm: choice of the backend, and copies through the host, with fake GPU tensors."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from minidist.comm import World
from minidist.tools.shm import gpu
from minidist.tools.shm.gpu import SHARED_GPU_VARIABLE, make_gpu_group
from minidist.tools.shm.host_staging import HostStagedGroup, HostStagedWork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")


def cards(gpus: str, versions=((2, 28, 9),), off=False) -> list[dict]:
    versions = [*versions, *[versions[-1]] * len(gpus)]
    return [{"gpu": gpu, "nccl": list(v), "off": off} for gpu, v in zip(gpus, versions, strict=False)]


@pytest.mark.parametrize(
    ("given", "nccl", "message"),
    [
        (cards("ab"), True, ""),
        (cards("aa", [(2, 30, 0)]), True, ""),
        (cards("aba", [(2, 30, 7)]), True, ""),
        (cards("aa"), False, "the ranks share a GPU, which nccl 2.28.9 refuses (2.30 is the first that can)"),
        (cards("aa", [(2, 30, 0), (2, 29, 3)]), False, "which nccl 2.29.3 refuses"),
        (cards("aa", [(2, 30, 0)], off=True), False, f"{SHARED_GPU_VARIABLE}=0 forbids that to nccl 2.30.0"),
        (cards("ab", [()]), False, "the ranks have GPUs and no nccl"),
    ],
)
def test_which_backend_carries_gpu_tensors(given, nccl, message, monkeypatch, capsys):
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    group = make_gpu_group(given, 0, "the host", lambda: "nccl")
    assert (group == "nccl") == nccl and isinstance(group, HostStagedGroup) == (not nccl)
    output = capsys.readouterr().err
    assert message in output and bool(output) == bool(message)
    shared = len({card["gpu"] for card in given}) < len(given)
    assert (os.environ.get(SHARED_GPU_VARIABLE) == "1") == (nccl and shared)
    make_gpu_group(given, 1, "the host", lambda: "nccl")
    assert not capsys.readouterr().err, "one rank speaks"


def above(*values: float) -> torch.Tensor:
    tensor = torch.tensor(values)
    tensor.above = True
    return tensor


def through_the_host(world: World) -> dict:
    gpu.is_on_gpu = lambda tensor: hasattr(tensor, "above")
    group = dist.new_group(backend="shm")
    group._cuda = HostStagedGroup(group)
    rank, size, seen = world.rank, world.size, {}

    def mine(n: int) -> torch.Tensor:
        return above(*(10.0 * rank + i for i in range(n)))

    def many(n: int) -> list[torch.Tensor]:
        return [above(*[0.0] * n) for _ in range(size)]

    x = mine(3)
    dist.all_reduce(x, group=group)
    seen["all_reduce"] = x.tolist()
    x = mine(3)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert isinstance(work, HostStagedWork) and x.tolist() == mine(3).tolist(), "nothing comes up before the wait"
    work.wait()
    work.wait()
    seen["async"] = x.tolist()
    x = mine(3)
    (result,) = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    seen["future"] = [result.tolist(), result is x]
    x = mine(2)
    dist.broadcast(x, 1, group=group)
    seen["broadcast"] = x.tolist()
    x = mine(2)
    dist.reduce(x, 0, group=group)
    seen["reduce"] = x.tolist() if rank == 0 else None
    parts = many(2)
    dist.all_gather(parts, mine(2), group=group)
    seen["all_gather"] = [part.tolist() for part in parts]
    whole = above(*[0.0] * 2 * size)
    dist.all_gather_into_tensor(whole, mine(2), group=group)
    seen["into"] = whole.tolist()
    parts = many(2)
    dist.gather(mine(2), parts if rank == 1 else None, 1, group=group)
    seen["gather"] = [part.tolist() for part in parts]
    x = above(0.0)
    dist.reduce_scatter(x, [mine(1) for _ in range(size)], group=group)
    seen["reduce_scatter"] = x.tolist()
    dist.reduce_scatter_tensor(x, mine(size), group=group)
    seen["tensor"] = x.tolist()
    dist.scatter(x, [above(float(i)) for i in range(size)] if rank == 0 else None, 0, group=group)
    seen["scatter"] = x.tolist()
    parts = many(1)
    dist.all_to_all(parts, [above(100.0 * rank + i) for i in range(size)], group=group)
    seen["all_to_all"] = [part.tolist() for part in parts]
    whole = above(*[0.0] * size)
    dist.all_to_all_single(whole, mine(size), group=group)
    seen["single"] = whole.tolist()
    dist.send(mine(2), 1, group=group) if rank == 0 else None
    if rank == 1:
        x = above(0.0, 0.0)
        dist.recv(x, 0, group=group)
        seen["recv"] = x.tolist()
    x, peer = above(0.0, 0.0), rank ^ 1
    if peer < size:
        both = [dist.P2POp(dist.isend, mine(2), peer, group), dist.P2POp(dist.irecv, x, peer, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    seen["batch"] = x.tolist()
    group._start_coalescing(torch.device("cuda"))
    pair = [mine(1), mine(2)]
    for tensor in pair:
        group.allreduce([tensor])
    group._end_coalescing(torch.device("cuda")).wait()
    seen["together"] = [tensor.tolist() for tensor in pair]
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_through_the_host(ranks, size):
    everyone = range(size)
    row = [[10.0 * rank + i for i in range(size)] for rank in everyone]
    two = [[10.0 * rank, 10.0 * rank + 1] for rank in everyone]
    total = [sum(10.0 * rank + i for rank in everyone) for i in range(3)]
    for rank, seen in enumerate(ranks(through_the_host, size, backend="gloo")):
        assert seen["all_reduce"] == seen["async"] == total
        assert seen["future"] == [total, True]
        assert seen["broadcast"] == two[1]
        assert seen["reduce"] == (total[:2] if rank == 0 else None)
        assert seen["all_gather"] == two and seen["into"] == sum(two, [])
        assert seen["gather"] == (two if rank == 1 else [[0.0, 0.0]] * size)
        assert seen["reduce_scatter"] == [total[0]]
        assert seen["tensor"] == [sum(10.0 * other + rank for other in everyone)]
        assert seen["scatter"] == [float(rank)]
        assert seen["all_to_all"] == [[100.0 * other + rank] for other in everyone]
        assert seen["single"] == [row[other][rank] for other in everyone]
        assert seen.get("recv", two[0]) == two[0]
        assert seen["batch"] == (two[rank ^ 1] if rank ^ 1 < size else [0.0, 0.0])
        assert seen["together"] == [total[:1], total[:2]]
