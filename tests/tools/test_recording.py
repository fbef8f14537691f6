"""The recording backend records the operations of `minidist.comm` and torch's raw calls."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from minidist import comm
from minidist.comm import GroupSpec, Meter, P2POp, World, bind
from minidist.mesh import Mesh
from minidist.tools.recording_backend import RecordingGroup, register_recording_backend


def both_mounts(world: World) -> tuple[list, list]:
    upper, lower = Meter(), Meter()
    groups = bind(
        world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=upper, backend=register_recording_backend(lower)
    )
    group, n = groups["data"], world.size
    comm.all_reduce(torch.ones(7), group)
    comm.all_reduce(torch.ones(3, dtype=torch.float64), group, "max", async_op=True).wait()
    comm.broadcast(torch.ones(5), n - 1, group)
    comm.all_gather(torch.empty(3 * n), torch.ones(3), group)
    comm.reduce_scatter(torch.empty(2), torch.ones(2 * n), group)
    comm.all_to_all(torch.empty(n, 3), torch.ones(n, 3), group)
    splits = [1 + (i == (world.rank + 1) % n) for i in range(n)]
    received = [1 + ((r + 1) % n == world.rank) for r in range(n)]
    comm.all_to_all(torch.empty(sum(received), 2), torch.ones(sum(splits), 2), group, received, splits)
    right, left = (world.rank + 1) % n, (world.rank - 1) % n
    comm.batch_send_recv([P2POp("send", torch.ones(4), right), P2POp("recv", torch.empty(4), left)], group)
    comm.barrier(group)
    return [facts(r) for r in upper.records], [facts(r) for r in lower.records]


def facts(record):
    numel = record.payload_bytes // record.dtype.itemsize
    return (record.name, record.ranks, numel, record.dtype, record.payload_bytes, record.wire_bytes, record.modelled)


@pytest.mark.parametrize("size", [2, 3])
def test_recordings_above_and_below_the_collectives_agree(ranks, size):
    for upper, lower in ranks(both_mounts, size):
        assert len(upper) == 10
        assert lower == upper


def parts_go_directly(world: World) -> tuple:
    """A reduce-scatter and an all-gather as the package makes them over gloo, seen at both mounts.

    The numbers of the ranks have no common sum in another order, and the results lie in the memory of what was given.
    """
    upper, lower = Meter(), Meter()
    groups = bind(
        world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=upper, backend=register_recording_backend(lower)
    )
    group, n = groups["data"], world.size
    group.uses_gloo = True  # a recording group is not, so that it shows what torch is asked for
    given = [torch.randn(n * 5, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    mine = given[world.rank].clone()
    part = mine[world.rank * 5 : (world.rank + 1) * 5]
    handle = comm.reduce_scatter(part, mine, group, async_op=True)
    largest = torch.empty(5)
    comm.reduce_scatter(largest, given[world.rank].clone(), group, "max")
    handle.wait()
    handle.wait()
    comm.all_gather(mine, part, group)
    total = given[0]
    for other in given[1:]:
        total = total + other
    assert torch.equal(mine, total)
    assert torch.equal(largest, torch.stack(given).amax(0)[world.rank * 5 : (world.rank + 1) * 5])
    return [(r.name, r.algorithm, r.wire_bytes, r.modelled) for r in upper.records], lower.records


@pytest.mark.parametrize("size", [2, 3, 4])
def test_direct_exchange_sends_the_metered_bytes(ranks, size):
    for rank, (upper, lower) in enumerate(ranks(parts_go_directly, size)):
        sent = 4 * 5 * (size - 1)  # every part but the own, once
        assert upper == [("reduce_scatter", "direct", sent, False)] * 2 + [("all_gather", "direct", sent, False)]
        assert sum(record.wire_bytes for record in lower) == 3 * sent
        to = {record.peer for record in lower if record.name == "send"}
        assert to == set(range(size)) - {rank}


def shifted(world: World) -> list:
    """The caller's own transfers, while a direct exchange is in flight between the same ranks."""
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], backend="gloo")
    group, n, rank = groups["data"], world.size, world.rank
    out, got = torch.empty(3), torch.empty(3)
    if rank % 2:
        handle = comm.reduce_scatter(out, torch.full((3 * n,), 1.0 + rank), group, async_op=True)
    sent = comm.send(torch.full((3,), 10.0 + rank), (rank + 1) % n, group, async_op=True)
    comm.recv(got, (rank - 1) % n, group)
    if not rank % 2:
        handle = comm.reduce_scatter(out, torch.full((3 * n,), 1.0 + rank), group, async_op=True)
    sent.wait()
    handle.wait()
    return [out.tolist(), got.tolist()]


@pytest.mark.parametrize("size", [2, 4])
def test_direct_exchange_does_not_match_other_transfers(ranks, size):
    for rank, (out, got) in enumerate(ranks(shifted, size)):
        assert out == [size * (size + 1) / 2] * 3
        assert got == [10.0 + (rank - 1) % size] * 3


# gloo of torch 2.11 has no all_to_all of lists.
LISTS = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)


def raw_calls(world: World) -> list:
    meter = Meter()
    group = dist.new_group(backend=register_recording_backend(meter))
    n, rank = world.size, world.rank
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    parts = [torch.empty(2) for _ in range(n)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(i)) for i in range(n)], group=group)
    outs = [torch.empty(1) for _ in range(n)]
    if LISTS:
        dist.all_to_all(outs, [torch.tensor([float(10 * rank + i)]) for i in range(n)], group=group)
        assert [o.item() for o in outs] == [10 * r + rank for r in range(n)]
    dist.reduce(torch.ones(3), dst=0, group=group)
    dist.gather(torch.ones(3), [torch.empty(3) for _ in range(n)] if rank == 0 else None, dst=0, group=group)
    scattered = torch.empty(3)
    dist.scatter(scattered, [torch.full((3,), float(i)) for i in range(n)] if rank == 0 else None, src=0, group=group)
    assert total.item() == sum(range(n))
    assert [p[0].item() for p in parts] == list(range(n))
    assert out.tolist() == [rank * n] * 2
    assert scattered.tolist() == [rank] * 3
    return [(r.name, r.payload_bytes, r.wire_bytes) for r in meter.records]


def test_raw_calls_are_recorded_and_unchanged(ranks):
    first, second = ranks(raw_calls, 2)
    # One element in two chunks of 1 and 0: what a rank sends of it depends on its place.
    assert first[0][:2] == second[0][:2] == ("all_reduce", 4) and first[0][2] + second[0][2] == 8
    shared = [("all_gather", 16, 8), ("reduce_scatter", 16, 8)] + [("all_to_all", 8, 4)] * LISTS
    assert first[1:-3] == second[1:-3] == shared
    assert first[-3:] == [("reduce", 12, 0), ("gather", 12, 0), ("scatter", 12, 12)]
    assert second[-3:] == [("reduce", 12, 12), ("gather", 12, 12), ("scatter", 12, 0)]


def under_ddp(world: World) -> tuple:
    meter = Meter()
    group = dist.new_group(backend=register_recording_backend(meter))
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(torch.nn.Linear(6, 5), process_group=group)
    meter.records.clear()
    model(torch.full((3, 6), 1.0 + world.rank)).sum().backward()
    return [(r.name, r.payload_bytes) for r in meter.records], model.module.weight.grad


def test_torchs_ddp_is_recorded(ranks):
    for records, grad in ranks(under_ddp, 2):
        assert records == [("all_reduce", 4 * (6 * 5 + 5))]
        # The gradient of a sum over 3 rows of ones (or twos), averaged by DDP over two ranks.
        assert torch.equal(grad, torch.full((5, 6), 4.5))


def under_fsdp(world: World) -> tuple:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    meter = Meter()
    group = dist.new_group(backend=register_recording_backend(meter))
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    meter.records.clear()
    model(torch.full((3, 6), 1.0 + world.rank)).sum().backward()
    return [(r.name, r.payload_bytes) for r in meter.records], model.weight.grad.to_local()


def test_torchs_fsdp2_is_recorded(ranks):
    for records, grad in ranks(under_fsdp, 2):
        names = [name for name, _ in records]
        assert names.count("reduce_scatter") == 1 and names.count("all_gather") >= 1
        assert {payload for name, payload in records} == {4 * 24}
        assert torch.equal(grad, torch.full((2, 6), 4.5))


# What a process group can do that moves no tensor between ranks, or that torch implements on top of the others.
NOT_TRAFFIC = {
    "abort", "bound_device_id", "boxed", "group_desc", "group_name", "get_group_store", "merge_remote_group",
    "monitored_barrier", "name", "rank", "size", "set_timeout", "shutdown", "split_group", "unbox",
    "use_pg_for_symm_mem_rendezvous", "recv_anysource",
}  # fmt: skip


def test_every_operation_that_torch_has_is_overridden():
    operations = {
        name
        for name in vars(dist.ProcessGroup)
        if not name.startswith("_") and callable(getattr(dist.ProcessGroup, name)) and name != "BackendType"
    }
    assert len(operations) > 20
    missing = operations - NOT_TRAFFIC - set(vars(RecordingGroup))
    assert not missing, f"torch {torch.__version__} has operations the meter would not see: {sorted(missing)}"


def deadlocked(world: World) -> None:
    group = dist.new_group(backend=register_recording_backend(Meter(), world.status))
    if world.rank == 0:
        dist.all_reduce(torch.ones(3), group=group)


def test_a_deadlock_of_raw_calls_is_explained(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(deadlocked, 2, deadline_s=60.0)
    assert failure.value.kind == "deadlock"
    assert "all_reduce #1" in str(failure.value) and "test_recording.py" in str(failure.value)


def crossed(world: World) -> None:
    name = register_recording_backend(Meter(), world.status)
    groups = [dist.new_group(backend=name) for _ in range(2)]
    for group in groups if world.rank else reversed(groups):
        dist.all_reduce(torch.ones(2), group=group)


def test_groups_of_the_same_ranks_are_reported_apart(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(crossed, 2, deadline_s=60.0)
    assert failure.value.kind == "deadlock"
    assert "of 'torch' (ranks 0-1)" in str(failure.value) and "of 'torch 2' (ranks 0-1)" in str(failure.value)
