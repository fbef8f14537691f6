"""Every collective on real ranks, against exact arithmetic."""

from functools import partial

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, P2POp, World, bind
from minidist.mesh import Mesh

SHAPES = [(), (1,), (5,), (3, 4), (0,), (2, 0)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]


def make_value(rank: int, shape=(6,), dtype=torch.float64) -> torch.Tensor:
    """A rank's input: small integers, different on every rank, so that sums are exact in every dtype."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * (rank + 2)) % 7 + rank).reshape(shape).to(dtype)


def check_all_operations(world: World, backend: str) -> int:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], backend=backend)
    group, n, rank, checks = groups["data"], world.size, world.rank, 0
    for shape in SHAPES:
        for dtype in DTYPES:
            every = torch.stack([make_value(r, shape, dtype) for r in range(n)])
            for async_op in (False, True):
                for op, expected in (("sum", every.sum(0)), ("max", every.amax(0)), ("min", every.amin(0))):
                    mine = make_value(rank, shape, dtype)
                    wait_twice(comm.all_reduce(mine, group, op, async_op=async_op))
                    assert_equal(mine, expected.to(dtype))
                for src in range(n):
                    mine = make_value(rank, shape, dtype)
                    wait_twice(comm.broadcast(mine, src, group, async_op=async_op))
                    assert_equal(mine, every[src])
                checks += 1
    for rows in (0, 1, 3):
        for async_op in (False, True):
            gathered = torch.full((n * rows, 2), -1.0)
            wait_twice(comm.all_gather(gathered, make_value(rank, (rows, 2), torch.float32), group, async_op=async_op))
            assert_equal(gathered, torch.cat([make_value(r, (rows, 2), torch.float32) for r in range(n)]))
            part = torch.full((rows, 2), -1.0)
            wait_twice(
                comm.reduce_scatter(part, make_value(rank, (n * rows, 2), torch.float32), group, async_op=async_op)
            )
            assert_equal(
                part,
                sum(make_value(r, (n * rows, 2), torch.float32) for r in range(n))[rank * rows : (rank + 1) * rows],
            )
            swapped = torch.full((n * rows, 2), -1.0)
            wait_twice(
                comm.all_to_all(swapped, make_value(rank, (n * rows, 2), torch.float32), group, async_op=async_op)
            )
            parts = [make_value(r, (n * rows, 2), torch.float32)[rank * rows : (rank + 1) * rows] for r in range(n)]
            assert_equal(swapped, torch.cat(parts))
            checks += 1
    splits = [[(r + c) % 3 for c in range(n)] for r in range(n)]  # rows that rank r has for rank c
    received = [splits[r][rank] for r in range(n)]
    swapped = torch.full((sum(received), 2), -1.0)
    comm.all_to_all(swapped, make_value(rank, (sum(splits[rank]), 2), torch.float32), group, received, splits[rank])
    starts = [sum(splits[r][:rank]) for r in range(n)]
    parts = [
        make_value(r, (sum(splits[r]), 2), torch.float32)[a : a + k]
        for r, (a, k) in enumerate(zip(starts, received, strict=True))
    ]
    assert_equal(swapped, torch.cat(parts))
    comm.barrier(group)
    return checks


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and torch.equal(got, expected), f"{got} is not {expected}"


def wait_twice(handle) -> None:
    if handle is not None:
        handle.wait()
        handle.wait()  # a second wait is harmless


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_match_exact_arithmetic(ranks, size, backend):
    assert ranks(check_all_operations, size, backend) == [len(SHAPES) * len(DTYPES) * 2 + 6] * size


def run_transfers(world: World) -> list:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("pipe", ("dp",))])
    group, n, rank = groups["pipe"], world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    # Everybody sends right and receives from the left; as blocking calls in this order it would deadlock.
    got = torch.empty(4)
    comm.batch_send_recv([P2POp("send", make_value(rank, (4,), torch.float32), right), P2POp("recv", got, left)], group)
    assert_equal(got, make_value(left, (4,), torch.float32))
    handle = comm.send(make_value(rank, (4,), torch.float32), right, group, tag=3, async_op=True)
    comm.recv(got, left, group, tag=3)
    handle.wait()
    assert_equal(got, make_value(left, (4,), torch.float32))
    return [(r.name, r.peer, r.seq, r.payload_bytes, r.wire_bytes, r.modelled) for r in groups.meter.records]


def test_transfers_arrive_and_are_counted_as_sent(ranks):
    for rank, records in enumerate(ranks(run_transfers, 3)):
        right, left = (rank + 1) % 3, (rank - 1) % 3
        assert records == [
            ("send", right, 1, 16, 16, False),
            ("recv", left, 1, 16, 0, False),
            ("send", right, 1, 16, 16, False),  # another tag is another channel
            ("recv", left, 1, 16, 0, False),
        ]


def record_meter(world: World) -> tuple:
    groups = bind(world, Mesh(dp=world.size), [GroupSpec("a", ("dp",)), GroupSpec("none", ("tp",))], meter=Meter())
    first = comm.all_reduce(torch.ones(10), groups["a"], async_op=True)
    second = comm.all_reduce(torch.ones(10, dtype=torch.float64), groups["control"], async_op=True)
    groups.meter.add_event("between")
    second.wait()
    first.wait()
    comm.all_reduce(torch.ones(10), groups["none"])
    meter = groups.meter
    order = [(r.group_name, r.launched, r.waited) for r in meter.records] + meter.events
    return order, [(r.group_name, r.seq, r.wire_bytes) for r in meter.records], meter.total_wire_bytes


def test_the_meter_records_order_and_bytes_and_ignores_groups_of_one(ranks):
    for rank, (order, records, total) in enumerate(ranks(record_meter, 4)):
        assert order == [("a", 1, 5), ("control", 2, 4), (3, "between")]
        # 10 elements in 4 chunks of 3, 3, 2, 2: 2 * 10 minus the chunks of the next two ranks.
        chunks = [3, 3, 2, 2]
        sent = 20 - chunks[(rank + 1) % 4] - chunks[(rank + 2) % 4]
        assert records == [("a", 1, 4 * sent), ("control", 1, 8 * sent)]
        assert total == 12 * sent


def gather_objects(world: World) -> list:
    groups = bind(world, Mesh(dp=world.size))
    return comm.all_gather_object({"rank": world.rank, "text": "x" * (1000 * world.rank)}, groups["control"])


@pytest.mark.parametrize("size", [1, 3])
def test_all_gather_object_returns_every_ranks_object(ranks, size):
    expected = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(size)]
    assert ranks(gather_objects, size) == [expected] * size


def gather_objects_to_one(world: World) -> tuple[list, int]:
    meter = Meter()
    group = bind(world, Mesh(dp=world.size), meter=meter)["control"]
    found = comm.gather_object({"rank": world.rank, "text": "x" * (1000 * world.rank)}, group)
    return found, sum(record.wire_bytes for record in meter.records)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather_object_brings_every_ranks_object_to_rank_0_only(ranks, size):
    (found, sent), *others = ranks(gather_objects_to_one, size)
    assert found == [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(size)] and sent == 0
    for rank, (nothing, sent) in enumerate(others, 1):
        assert nothing == [] and 1000 * rank < sent < 1000 * rank + 100  # whatever the number of ranks


def reduce_in_mesh_groups(world: World) -> list:
    mesh = Mesh(pp=2, tp=2)
    groups = bind(world, mesh, [GroupSpec("tp", ("tp",)), GroupSpec("pp", ("pp",)), GroupSpec("all", ("pp", "tp"))])
    sums = []
    for use in ("pp", "tp", "all"):
        mine = torch.tensor([10.0**world.rank])
        comm.all_reduce(mine, groups[use])
        sums.append((groups[use].ranks, mine.item()))
    return sums


def test_groups_of_a_mesh_reduce_over_their_own_ranks(ranks):
    for rank, sums in enumerate(ranks(reduce_in_mesh_groups, 4)):
        pp, tp = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert sums == [(g, sum(10.0**r for r in g)) for g in (pp, tp, (0, 1, 2, 3))]


def collect_errors(world: World) -> list[str]:
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
    message = []
    for call in calls:
        with pytest.raises((ValueError, KeyError)) as error:
            call()
        message.append(str(error.value))
    return message


def test_invalid_calls_are_refused(ranks):
    for rank, message in enumerate(ranks(collect_errors, 2)):
        assert "the full tensor has 5 elements of torch.float32, the shard 2" in message[0]
        assert "4 of torch.float64" in message[1] or "4 elements of torch.float64" in message[1]
        assert f"send with peer {rank}: this is rank {rank} of 2" in message[2]
        assert "recv with peer 2" in message[3]
        assert "has 3 ranks, the world has 2" in message[4]
        assert "two group specs share a name" in message[5]
        assert "no group 'grads': this rank has the groups control" in message[6]


def test_a_world_of_one_needs_no_process_group():
    assert check_all_operations(World.single(), None) == len(SHAPES) * len(DTYPES) * 2 + 6


def reduce_different_sizes(world: World) -> None:
    group = bind(world, Mesh(dp=2))["control"]
    comm.all_reduce(torch.ones(3 if world.rank == 0 else 300_000), group)


def test_different_sizes_are_reported_as_a_mismatch(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(reduce_different_sizes, 2, deadline_s=60.0)
    assert failure.value.kind == "mismatch"  # gloo may abort one of the processes
    assert "all_reduce (3,) float32" in str(failure.value) and "all_reduce (300000,) float32" in str(failure.value)


def die_on_one_rank(world: World) -> None:
    import os

    group = bind(world, Mesh(dp=2))["control"]
    if world.rank == 1:
        os.abort()
    comm.all_reduce(torch.ones(3), group)


def test_a_died_rank_is_reported_as_died(server):
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(die_on_one_rank, 2, deadline_s=60.0)
    assert failure.value.kind == "died" and "rank 1 died" in str(failure.value)


def kind_and_report(server, function) -> tuple[str, str]:
    from minidist.tools.launch import RankFailure

    with pytest.raises(RankFailure) as failure:
        server.run(function, 2, deadline_s=60.0)
    return failure.value.kind, str(failure.value)


def broadcast_from_different_roots(world: World) -> None:
    comm.broadcast(torch.ones(3), world.rank, bind(world, Mesh(dp=2))["control"])


def test_a_broadcast_from_different_roots_is_a_mismatch(server):
    kind, text = kind_and_report(server, broadcast_from_different_roots)
    assert kind == "mismatch" and "broadcast root 0 (3,)" in text and "broadcast root 1 (3,)" in text


def reduce_with_different_ops(world: World) -> None:
    comm.all_reduce(torch.ones(3), bind(world, Mesh(dp=2))["control"], "max" if world.rank else "sum")
    comm.barrier(bind(world, Mesh(dp=2))["control"]) if world.rank else None  # the end of rank 0 brings it to light


def test_different_reduction_ops_are_reported(server):
    kind, text = kind_and_report(server, reduce_with_different_ops)
    assert kind in ("mismatch", "deadlock"), text


def bind_on_one_rank(world: World) -> None:
    if world.rank == 0:
        bind(world, Mesh(dp=2))


def test_bind_called_by_one_rank_only_is_a_deadlock(server):
    kind, text = kind_and_report(server, bind_on_one_rank)
    assert kind == "deadlock" and "bind #1" in text and "rank 1: returned" in text


def reduce_different_shapes(world: World) -> list:
    x = torch.ones(8) if world.rank else torch.ones(4, 2)
    comm.all_reduce(x, bind(world, Mesh(dp=2))["control"])
    return x.flatten().tolist()


def test_different_shapes_with_equal_numel_are_allowed(ranks):
    assert ranks(reduce_different_shapes, 2) == [[2.0] * 8] * 2


def test_every_name_of_all_exists_in_comm():
    for name in comm.__all__:
        assert getattr(comm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'some_operation'"):
        _ = comm.some_operation
