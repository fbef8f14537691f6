"""Operations of one queue of `shm` stay in order, and no queue waits for another."""

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minidist import comm
from minidist.comm import World
from minidist.comm.handles import expect_immediate_wait
from minidist.mesh import Mesh
from minidist.tools.shm import group_creation
from minidist.tools.shm.barrier import GroupBarrier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")

LARGE = 2**24  # elements of float32: 64 MiB, far more than any buffer


def opposite_order(world: World) -> list:
    one, other = (dist.new_group(backend="shm") for _ in range(2))
    a, b = torch.full((3,), 1.0), torch.full((500_000,), 2.0)
    if world.rank == 0:
        works = [dist.all_reduce(a, group=one, async_op=True), dist.all_reduce(b, group=other, async_op=True)]
    else:
        works = [dist.all_reduce(b, group=other, async_op=True), dist.all_reduce(a, group=one, async_op=True)]
    for work in works:
        work.wait()
    return [a.unique().tolist(), b.unique().tolist()]


def test_two_groups_launched_in_opposite_order(ranks):
    assert ranks(opposite_order, 2) == [[[2.0], [4.0]]] * 2


def a_collective_in_flight_with_transfers(world: World) -> list:
    group = dist.new_group(backend="shm")
    x, token = torch.ones(500_000), torch.full((10,), float(world.rank))
    if world.rank == 0:
        pending = dist.all_reduce(x, group=group, async_op=True)
        dist.send(token, 1, group=group)
        dist.recv(token, 1, group=group)
    else:
        dist.recv(token, 0, group=group)
        dist.send(token + 5, 0, group=group)
        pending = dist.all_reduce(x, group=group, async_op=True)
    pending.wait()
    return [x.unique().tolist(), token.tolist()[:1]]


def test_an_all_reduce_in_flight_with_transfers_on_the_same_group(ranks):
    assert ranks(a_collective_in_flight_with_transfers, 2) == [[[2.0], [5.0]], [[2.0], [0.0]]]


def send_before_and_receive_after(world: World) -> list:
    group = dist.new_group(backend="shm")
    x, token = torch.ones(5), torch.full((300_000,), 7.0 * world.rank)
    if world.rank == 1:
        sending = dist.isend(token, 0, group=group)
        dist.all_reduce(x, group=group)
        sending.wait()
    else:
        dist.all_reduce(x, group=group)
        dist.irecv(token, 1, group=group).wait()
    return [x.tolist()[0], token.unique().tolist()]


def test_isend_before_all_reduce_meets_irecv_after_it(ranks):
    assert ranks(send_before_and_receive_after, 2) == [[2.0, [7.0]]] * 2


def head_to_head(world: World) -> list:
    group, other = dist.new_group(backend="shm"), 1 - world.rank
    mine, theirs = torch.full((LARGE,), float(world.rank)), torch.empty(LARGE)
    sending = dist.isend(mine, other, group=group)
    dist.recv(theirs, other, group=group)
    sending.wait()
    return theirs[:: LARGE - 1].tolist()


def test_head_to_head_isends_of_64_mib(ranks):
    assert ranks(head_to_head, 2) == [[1.0, 1.0], [0.0, 0.0]]


def a_large_transfer_nobody_receives_yet(world: World) -> list:
    group = dist.new_group(backend="shm")
    large, small, x = torch.ones(LARGE), torch.full((3,), 9.0), torch.ones(400_000)
    if world.rank == 0:
        waiting = [dist.isend(large, 1, group=group, tag=tag) for tag in range(6)]
        dist.send(small, 1, group=group, tag=9)
    else:
        dist.recv(small, 0, group=group, tag=9)
    dist.all_reduce(x, group=group)
    if world.rank == 1:
        waiting = [dist.irecv(torch.empty(LARGE), 0, group=group, tag=tag) for tag in reversed(range(6))]
    for work in waiting:
        work.wait()
    return [small.tolist()[0], x.unique().tolist()]


def test_large_transfers_that_are_not_matched_block_no_other(ranks):
    assert ranks(a_large_transfer_nobody_receives_yet, 2) == [[9.0, [2.0]]] * 2


def many_in_flight(world: World) -> bool:
    groups = [dist.new_group(backend="shm") for _ in range(4)]
    tensors = [torch.full((1 + i * 3000,), float(i)) for i in range(100)]
    works = [dist.all_reduce(t, group=groups[i % 4], async_op=True) for i, t in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    return all(t.unique().tolist() == [i * world.size] for i, t in enumerate(tensors))


def test_a_hundred_operations_in_flight_over_four_groups(ranks):
    assert all(ranks(many_in_flight, 3))


def overlapped(world: World) -> list:
    group, order = dist.new_group(backend="shm"), []
    x = torch.ones(4)
    if world.rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        order.append(work.is_completed())  # the other has not come
        dist.send(torch.ones(1), 1, group=group)  # now it comes, while this rank waits for nothing
        while not work.is_completed():
            time.sleep(0)
        order.append(work.is_success())
    else:
        dist.recv(torch.ones(1), 0, group=group)
        dist.all_reduce(x, group=group)
    return [*order, x.tolist()[0]]


def test_an_asynchronous_operation_goes_on_while_nobody_waits_for_it(ranks):
    assert ranks(overlapped, 2) == [[False, True, 2.0], [2.0]]


def threads_used(world: World) -> tuple:
    group, seen = dist.new_group(backend="shm"), []
    begin = GroupBarrier.begin_operation
    GroupBarrier.begin_operation = lambda self, *a: (seen.append(threading.current_thread().name), begin(self, *a))[1]
    for _ in range(5):
        dist.all_reduce(torch.ones(4), group=group)
    alone, before = set(seen), threading.active_count()
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(3)]
    dist.all_reduce(torch.ones(4), group=group)  # something is before it: it takes its turn
    for work in works:
        work.wait()
    return alone, threading.active_count() - before <= 1


def test_a_synchronous_call_with_nothing_queued_runs_in_the_callers_thread(ranks):
    assert ranks(threads_used, 2) == [({"MainThread"}, True)] * 2


def destroyed_with_work_pending(world: World) -> list:
    message = []
    for turn in range(3):
        name = f"pending{turn}"
        dist.destroy_process_group()
        store = dist.PrefixStore(name, world.store)
        dist.init_process_group("shm", store=store, rank=world.rank, world_size=world.size)
        x = torch.ones(1000)
        dist.all_reduce(x)
        message.append(x[0].item())
        works = []
        if world.rank == 0:  # the other rank never comes to any of them
            works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
            works += [dist.isend(torch.ones(LARGE), 1), dist.irecv(torch.ones(3), 1, tag=5)]
        dist.destroy_process_group()
        for work in works:
            try:
                work.wait()
                message.append("done")
            except dist.DistBackendError as error:
                message.append("destroyed" if "destroyed" in str(error) or "left" in str(error) else str(error))
        message.append(len(group_creation._CONTEXT))
        dist.init_process_group("gloo", store=dist.PrefixStore(name + "g", world.store), rank=world.rank, world_size=2)
        dist.barrier()
    return message


def test_destroy_with_work_pending_and_initialise_again(ranks):
    first, second = ranks(destroyed_with_work_pending, 2)
    assert first == [2.0, *["destroyed"] * 4, 0] * 3
    assert second == [2.0, 0] * 3


def the_same_store_again(world: World) -> list:
    results = []
    for turn in range(4):
        dist.destroy_process_group()
        dist.init_process_group("shm", store=world.store, rank=world.rank, world_size=world.size)
        x = torch.full((3,), float(turn))
        dist.all_reduce(x)
        results.append(x[0].item())
    return results


def test_initialised_again_through_the_same_store(ranks):
    assert ranks(the_same_store_again, 3) == [[0.0, 3.0, 6.0, 9.0]] * 3


def finished_late(world: World) -> list:
    group = dist.new_group(backend="shm")
    x = torch.ones(2_000_000)
    work = dist.all_reduce(x, group=group, async_op=True)
    if world.rank == 0:
        work.wait()
    dist.destroy_process_group(group)  # the other ranks have not waited: what can end still ends
    work.wait()
    return x.unique().tolist()


def test_work_in_flight_ends_although_the_group_is_destroyed(ranks):
    assert ranks(finished_late, 3) == [[3.0]] * 3


def through_the_door(world: World) -> tuple[list[str], list[float]]:
    group = comm.bind(world, Mesh(dp=world.size), [comm.GroupSpec("here", ("dp",))])["here"]
    x = torch.ones(300_000)
    comm.all_reduce(x, group)
    comm.barrier(group)
    if world.rank:
        comm.recv(x, 0, group)
    else:
        comm.send(x * 3, 1, group)
    workers = [thread.name for thread in threading.enumerate() if thread.name == "shm"]
    comm.all_reduce(x, group, async_op=True).wait()  # and then the others are still done by somebody
    return workers, x.unique().tolist()


def test_an_immediate_wait_runs_without_a_worker_thread(ranks):
    assert ranks(through_the_door, 2, backend="shm") == [([], [8.0]), ([], [8.0])]


def test_a_wait_with_a_time_limit_needs_a_worker(ranks):
    assert ranks(limited, 2, backend="gloo") == [True, True]


def limited(world: World) -> bool:
    group = dist.new_group(backend="shm")
    with expect_immediate_wait():
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    return work.wait(timedelta(seconds=30))
