"""DDP, FSDP and other users of torch.distributed run unchanged on `shm`, with the results of gloo."""

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.comm import World
from tests.helpers.exhaustive import exhaustive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)


def trained(wrapped: nn.Module, rank: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), lr=0.3), []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def again(world: World, backend: str) -> None:
    dist.destroy_process_group()
    store = dist.PrefixStore(backend, world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=40))


def under_ddp(world: World, backend: str) -> list[float]:
    again(world, backend)
    wrapped = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.02)
    return trained(wrapped, world.rank)


def under_fsdp(world: World, backend: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    again(world, backend)
    wrapped, mesh = model(), init_device_mesh("cpu", (world.size,))
    for layer in wrapped:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return trained(fully_shard(wrapped, mesh=mesh), world.rank)


def under_tensor_parallel(world: World, backend: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    again(world, backend)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    wrapped = parallelize_module(model(), init_device_mesh("cpu", (world.size,)), plan)
    return trained(wrapped, 0)


def under_pipelining(world: World, backend: str) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    again(world, backend)
    whole = list(model())
    cuts = [0, 2, 5] if world.size == 2 else [0, 1, 2, 4, 5]
    part = nn.Sequential(*whole[cuts[world.rank] : cuts[world.rank + 1]])
    stage = PipelineStage(part, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.cross_entropy)
    parameters, seen = list(part.parameters()), []  # one of the stages of four has none
    for step in range(STEPS):
        x, y = batch(0, step)
        losses: list[torch.Tensor] = []
        if world.rank == world.size - 1:
            schedule.step(target=y, losses=losses)
        elif world.rank == 0:
            schedule.step(x)
        else:
            schedule.step()
        for parameter in parameters:
            parameter.data -= 0.3 * parameter.grad
            parameter.grad = None
        seen += [loss.item() for loss in losses]
    return seen


ALL = {"DDP": under_ddp, "FSDP2": under_fsdp, "DTensor": under_tensor_parallel, "pipelining": under_pipelining}


@pytest.mark.parametrize("size", [2, *exhaustive(4)])
@pytest.mark.parametrize("name", ALL)
def test_torchs_own_parallelism_gives_the_losses_of_gloo(ranks, name, size):
    on_shm, on_gloo = (ranks(ALL[name], size, backend) for backend in ("shm", "gloo"))
    assert any(on_shm)
    if size == 2 or name == "pipelining":
        assert on_shm == on_gloo  # a sum of two does not depend on the order, and a transfer adds nothing
    for a, b in zip(on_shm, on_gloo, strict=True):
        # Three roundings more or less in each gradient of float32, through four steps: 1e-5 is a hundred of them.
        assert a == pytest.approx(b, rel=1e-5)


def objects_and_more(world: World) -> dict:
    again(world, "shm")
    n, rank, found = world.size, world.rank, {}
    everyone, one = [None] * n, [f"from {rank}"]
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 50_000 * rank})
    found["all_gather_object"] = [len(each["text"]) for each in everyone] == [50_000 * r for r in range(n)]
    dist.broadcast_object_list(one, src=n - 1)
    found["broadcast_object_list"] = one == [f"from {n - 1}"]
    gathered, scattered = [None] * n if rank == 0 else None, [None]
    dist.gather_object((rank, "a"), gathered, dst=0)
    found["gather_object"] = rank != 0 or gathered == [(r, "a") for r in range(n)]
    dist.scatter_object_list(scattered, [[r] for r in range(n)] if rank == 1 else None, src=1)
    found["scatter_object_list"] = scattered == [[rank]]
    from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor

    summed = all_reduce(torch.ones(3) * rank, "sum", dist.group.WORLD)
    parts = reduce_scatter_tensor(torch.ones(2 * n), "sum", 0, dist.group.WORLD)
    found["functional"] = summed.tolist() + parts.tolist() == [n * (n - 1) / 2] * 3 + [n] * 2
    tensors = [torch.full((i + 1,), float(rank)) for i in range(4)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.all_reduce(tensor)
    found["coalesced"] = [t.unique().item() for t in tensors] == [n * (n - 1) / 2] * 4
    right, left, got = (rank + 1) % n, (rank - 1) % n, torch.empty(70_000)
    ops = [dist.P2POp(dist.isend, torch.full((70_000,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["batch_isend_irecv"] = got.unique().tolist() == [left]
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0].sum().item())
    found["future"] = future.wait() == 2 * n
    dist.monitored_barrier = None  # torch itself keeps it to gloo; ours is the group's method
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    group = dist.new_group([0, n - 1])  # the default backend, some ranks
    x = torch.ones(1)
    if rank in (0, n - 1):
        dist.all_reduce(x, group=group)
    found["new_group"] = x.item() == (2.0 if rank in (0, n - 1) else 1.0)
    return {name: ok for name, ok in found.items() if not ok}


def test_objects_functional_collectives_coalescing_batches_and_futures(ranks):
    assert ranks(objects_and_more, 3) == [{}] * 3


def ddp_that_loses_a_rank(world: World) -> str:
    again(world, "shm")
    wrapped = nn.parallel.DistributedDataParallel(model())
    x, y = batch(world.rank, 0)
    loss = F.cross_entropy(wrapped(x), y)
    if world.rank == 1:
        dist.destroy_process_group()
        return "left"
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ddp_raises_the_name_of_the_lost_rank(ranks):
    stayed, left = ranks(ddp_that_loses_a_rank, 2)
    assert left == "left" and "rank 1 has left" in stayed
