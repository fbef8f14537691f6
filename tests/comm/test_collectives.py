"""Every collective on real ranks, against what arithmetic says."""

from functools import partial

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, P2POp, World, bind
from minidist.mesh import Mesh

SHAPES = [(), (1,), (5,), (3, 4), (0,), (2, 0)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]


def value(rank: int, shape=(6,), dtype=torch.float64) -> torch.Tensor:
    """What a rank contributes: small whole numbers, so that sums are exact in every dtype, different on every rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * (rank + 2)) % 7 + rank).reshape(shape).to(dtype)


def everything(world: World, backend: str) -> int:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], backend=backend)
    group, n, rank, checks = groups["data"], world.size, world.rank, 0
    for shape in SHAPES:
        for dtype in DTYPES:
            every = torch.stack([value(r, shape, dtype) for r in range(n)])
            for async_op in (False, True):
                for op, want in (("sum", every.sum(0)), ("max", every.amax(0)), ("min", every.amin(0))):
                    mine = value(rank, shape, dtype)
                    finish(comm.all_reduce(mine, group, op, async_op=async_op))
                    same(mine, want.to(dtype))
                for src in range(n):
                    mine = value(rank, shape, dtype)
                    finish(comm.broadcast(mine, src, group, async_op=async_op))
                    same(mine, every[src])
                checks += 1
    for rows in (0, 1, 3):
        for async_op in (False, True):
            gathered = torch.full((n * rows, 2), -1.0)
            finish(comm.all_gather(gathered, value(rank, (rows, 2), torch.float32), group, async_op=async_op))
            same(gathered, torch.cat([value(r, (rows, 2), torch.float32) for r in range(n)]))
            part = torch.full((rows, 2), -1.0)
            finish(comm.reduce_scatter(part, value(rank, (n * rows, 2), torch.float32), group, async_op=async_op))
            same(part, sum(value(r, (n * rows, 2), torch.float32) for r in range(n))[rank * rows : (rank + 1) * rows])
            swapped = torch.full((n * rows, 2), -1.0)
            finish(comm.all_to_all(swapped, value(rank, (n * rows, 2), torch.float32), group, async_op=async_op))
            parts = [value(r, (n * rows, 2), torch.float32)[rank * rows : (rank + 1) * rows] for r in range(n)]
            same(swapped, torch.cat(parts))
            checks += 1
    splits = [[(r + c) % 3 for c in range(n)] for r in range(n)]  # rows that rank r has for rank c
    received = [splits[r][rank] for r in range(n)]
    swapped = torch.full((sum(received), 2), -1.0)
    comm.all_to_all(swapped, value(rank, (sum(splits[rank]), 2), torch.float32), group, received, splits[rank])
    starts = [sum(splits[r][:rank]) for r in range(n)]
    parts = [
        value(r, (sum(splits[r]), 2), torch.float32)[a : a + k]
        for r, (a, k) in enumerate(zip(starts, received, strict=True))
    ]
    same(swapped, torch.cat(parts))
    comm.barrier(group)
    return checks


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and torch.equal(got, want), f"{got} is not {want}"


def finish(handle) -> None:
    if handle is not None:
        handle.wait()
        handle.wait()  # a second wait is harmless


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operations_give_what_arithmetic_says(ranks, size, backend):
    assert ranks(everything, size, backend) == [len(SHAPES) * len(DTYPES) * 2 + 6] * size


def transfers(world: World) -> list:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("pipe", ("dp",))])
    group, n, rank = groups["pipe"], world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    # Everybody sends right and receives from the left; as blocking calls in this order it would deadlock.
    got = torch.empty(4)
    comm.batch_send_recv([P2POp("send", value(rank, (4,), torch.float32), right), P2POp("recv", got, left)], group)
    same(got, value(left, (4,), torch.float32))
    handle = comm.send(value(rank, (4,), torch.float32), right, group, tag=3, async_op=True)
    comm.recv(got, left, group, tag=3)
    handle.wait()
    same(got, value(left, (4,), torch.float32))
    return [(r.name, r.peer, r.seq, r.payload_bytes, r.wire_bytes, r.modelled) for r in groups.meter.records]


def test_transfers_arrive_and_are_counted_as_sent(ranks):
    for rank, records in enumerate(ranks(transfers, 3)):
        right, left = (rank + 1) % 3, (rank - 1) % 3
        assert records == [
            ("send", right, 1, 16, 16, False),
            ("recv", left, 1, 16, 0, False),
            ("send", right, 1, 16, 16, False),  # another tag is another channel
            ("recv", left, 1, 16, 0, False),
        ]


def metered(world: World) -> tuple:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("a", ("dp",)), GroupSpec("none", ("tp",))], meter=Meter())
    first = comm.all_reduce(torch.ones(10), groups["a"], async_op=True)
    second = comm.all_reduce(torch.ones(10, dtype=torch.float64), groups["control"], async_op=True)
    groups.meter.event("between")
    second.wait()
    first.wait()
    comm.all_reduce(torch.ones(10), groups["none"])
    meter = groups.meter
    order = [(r.use, r.launched, r.waited) for r in meter.records] + meter.events
    return order, [(r.use, r.seq, r.wire_bytes) for r in meter.records], meter.total_wire_bytes


def test_the_meter_keeps_order_and_bytes_and_a_group_of_one_sends_nothing(ranks):
    for rank, (order, records, total) in enumerate(ranks(metered, 4)):
        assert order == [("a", 1, 5), ("control", 2, 4), (3, "between")]
        # 10 elements in 4 chunks of 3, 3, 2, 2: 2 * 10 minus the chunks of the next two ranks.
        chunks = [3, 3, 2, 2]
        sent = 20 - chunks[(rank + 1) % 4] - chunks[(rank + 2) % 4]
        assert records == [("a", 1, 4 * sent), ("control", 1, 8 * sent)]
        assert total == 12 * sent


def objects(world: World) -> list:
    groups = bind(world, Mesh(dp=world.size))
    return comm.all_gather_object({"rank": world.rank, "text": "x" * (1000 * world.rank)}, groups["control"])


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_knows_every_object(ranks, size):
    want = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(size)]
    assert ranks(objects, size) == [want] * size


def overlapping(world: World) -> list:
    mesh = Mesh(pp=2, tp=2)
    groups = bind(world, mesh, [GroupSpec("tp", ("tp",)), GroupSpec("pp", ("pp",)), GroupSpec("all", ("pp", "tp"))])
    sums = []
    for use in ("pp", "tp", "all"):
        mine = torch.tensor([10.0**world.rank])
        comm.all_reduce(mine, groups[use])
        sums.append((groups[use].ranks, mine.item()))
    return sums


def test_groups_of_a_mesh_talk_among_themselves(ranks):
    for rank, sums in enumerate(ranks(overlapping, 4)):
        pp, tp = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert sums == [(g, sum(10.0**r for r in g)) for g in (pp, tp, (0, 1, 2, 3))]


def refusals(world: World) -> list[str]:
    groups = bind(world, Mesh(dp=2))
    control = groups["control"]
    calls = [
        partial(comm.all_gather, torch.empty(5), torch.empty(2), control),
        partial(comm.reduce_scatter, torch.empty(2), torch.empty(4, dtype=torch.float64), control),
        partial(comm.send, torch.empty(2), world.rank, control),
        partial(comm.recv, torch.empty(2), 2, control),
        partial(bind, world, Mesh(dp=3)),
        partial(bind, world, Mesh(dp=2), [GroupSpec("x", ("dp",)), GroupSpec("x", ("tp",))]),
        partial(groups.__getitem__, "grads"),
    ]
    said = []
    for call in calls:
        with pytest.raises((ValueError, KeyError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_impossible_calls_are_refused_before_anything_is_sent(ranks):
    for rank, said in enumerate(ranks(refusals, 2)):
        assert "the full tensor has 5 elements of torch.float32, the shard 2" in said[0]
        assert "4 of torch.float64" in said[1] or "4 elements of torch.float64" in said[1]
        assert f"send with peer {rank}: this is rank {rank} of 2" in said[2]
        assert "recv with peer 2" in said[3]
        assert "has 3 ranks, the world has 2" in said[4]
        assert "two uses share a name" in said[5]
        assert "no group for 'grads': this rank has groups for control" in said[6]


def test_a_world_of_one_needs_no_process_group():
    assert everything(World.single(), None) == len(SHAPES) * len(DTYPES) * 2 + 6


def other_sizes(world: World) -> None:
    group = bind(world, Mesh(dp=2))["control"]
    comm.all_reduce(torch.ones(3 if world.rank == 0 else 300_000), group)


def test_sizes_that_differ_are_reported_whatever_the_backend_does_with_them(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(other_sizes, 2, deadline_s=60.0)
    assert failure.value.kind == "mismatch"  # gloo may abort one of the processes
    assert "all_reduce (3,) float32" in str(failure.value) and "all_reduce (300000,) float32" in str(failure.value)


def dies_alone(world: World) -> None:
    import os

    group = bind(world, Mesh(dp=2))["control"]
    if world.rank == 1:
        os.abort()
    comm.all_reduce(torch.ones(3), group)


def test_a_death_without_a_mismatch_is_reported_as_a_death(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(dies_alone, 2, deadline_s=60.0)
    assert failure.value.kind == "died" and "rank 1 died" in str(failure.value)


def told(server, function) -> tuple[str, str]:
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(function, 2, deadline_s=60.0)
    return failure.value.kind, str(failure.value)


def own_root(world: World) -> None:
    comm.broadcast(torch.ones(3), world.rank, bind(world, Mesh(dp=2))["control"])


def test_a_broadcast_from_several_roots_is_found(server):
    kind, text = told(server, own_root)
    assert kind == "mismatch" and "broadcast root 0 (3,)" in text and "broadcast root 1 (3,)" in text


def own_reduction(world: World) -> None:
    comm.all_reduce(torch.ones(3), bind(world, Mesh(dp=2))["control"], "max" if world.rank else "sum")
    comm.barrier(bind(world, Mesh(dp=2))["control"]) if world.rank else None  # the end of rank 0 brings it to light


def test_reductions_that_differ_are_found_when_ranks_stand_still(server):
    kind, text = told(server, own_reduction)
    assert kind in ("mismatch", "deadlock"), text


def bound_alone(world: World) -> None:
    if world.rank == 0:
        bind(world, Mesh(dp=2))


def test_groups_that_one_rank_does_not_make_are_a_deadlock(server):
    kind, text = told(server, bound_alone)
    assert kind == "deadlock" and "bind #1" in text and "rank 1: returned" in text


def other_view(world: World) -> list:
    x = torch.ones(8) if world.rank else torch.ones(4, 2)
    comm.all_reduce(x, bind(world, Mesh(dp=2))["control"])
    return x.flatten().tolist()


def test_another_shape_of_as_many_elements_is_legal(ranks):
    assert ranks(other_view, 2) == [[2.0] * 8] * 2


def test_everything_the_door_names_is_there_and_nothing_else():
    for name in comm.__all__:
        assert getattr(comm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'some_operation'"):
        _ = comm.some_operation
