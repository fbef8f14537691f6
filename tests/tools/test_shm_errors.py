"""Errors of `shm`: mismatched operations, ranks that left, timeouts and unsupported calls."""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minidist.comm import World
from minidist.tools.shm.process_context import ProcessContext
from minidist.tools.shm.reduce import Reduction
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux; elsewhere it is gloo")


def run_different_operations(world: World, how: str) -> str:
    group, rank = dist.new_group(backend="shm"), world.rank
    dist.barrier(group)
    x = torch.ones(10 if rank or how != "size" else 300_000, dtype=torch.float64 if how == "dtype" and rank else None)
    try:
        if how == "operation" and rank == 1:
            dist.broadcast(x, 0, group=group)
        elif how == "reduction":
            dist.all_reduce(x, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group=group)
        elif how == "root":
            dist.broadcast(x, rank % 2, group=group)
        else:
            dist.all_reduce(x, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "how, words",
    [
        ("operation", ["operation 2: all_reduce sum float32 10 [10]", "operation 2: broadcast root 0 float32 10 [10]"]),
        ("size", ["all_reduce sum float32 300000 [300000]", "all_reduce sum float32 10 [10]"]),
        ("dtype", ["all_reduce sum float32 10 [10]", "all_reduce sum float64 10 [10]"]),
        ("reduction", ["all_reduce sum float32 10", "all_reduce max float32 10"]),
        ("root", ["broadcast root 0 float32 10", "broadcast root 1 float32 10"]),
    ],
)
def test_mismatched_operations_are_reported_by_rank(ranks, how, words):
    for text in ranks(run_different_operations, 3, how):
        assert all(word in text for word in words), text
        assert "rank" in text and "(ranks 0, 1, 2)" in text


def transfers_differ(world: World, size: int) -> str:
    group = dist.new_group(backend="shm")
    try:
        if world.rank == 0:
            dist.send(torch.ones(size), 1, group=group, tag=4)
        else:
            dist.recv(torch.ones(size + 1), 0, group=group, tag=4)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_send_and_a_recv_of_different_sizes_are_reported(ranks, size):
    for text in ranks(transfers_differ, 2, size):
        assert f"rank 0 sends float32 [{size}] to rank 1, which receives float32 [{size + 1}]" in text


def leaves(world: World, late: str) -> str:
    """Rank 1 destroys the group while the others wait for it."""
    group = dist.new_group(backend="shm")
    dist.barrier(group)
    if world.rank == 1:
        dist.destroy_process_group(group)
        return "left"
    begun_s = time.monotonic()
    try:
        if late == "collective":
            dist.all_reduce(torch.ones(5), group=group)
        elif late == "recv":
            dist.recv(torch.ones(5), 1, group=group)
        else:
            dist.send(torch.ones(5), 1, group=group)
    except dist.DistBackendError as error:
        assert time.monotonic() - begun_s < 5.0
        return str(error)
    return "no error"


@pytest.mark.parametrize("late", ["collective", "recv", "send"])
def test_a_rank_that_leaves_is_not_waited_for(ranks, late):
    zero, one, two = ranks(leaves, 3, late)
    assert one == "left"
    assert "rank 1" in zero and "rank 1" in two


def leaves_while_waited_for(world: World) -> str:
    """Rank 2 leaves while rank 0 waits in a recv from it, and in a collective where rank 1 is missing too."""
    group, message = dist.new_group(backend="shm"), []
    dist.barrier(group)
    if world.rank == 0:
        receiving = dist.irecv(torch.ones(5), 2, group=group)
        reducing = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    dist.barrier()
    if world.rank == 2:
        dist.destroy_process_group(group)
    elif world.rank == 0:
        for work in (receiving, reducing):
            try:
                work.wait(timedelta(seconds=30))
            except dist.DistBackendError as error:
                message.append(str(error))
    dist.barrier()  # rank 1 has been elsewhere all the time
    return " / ".join(message)


def test_a_wait_for_several_ranks_reports_the_one_that_left(ranks):
    message, *_ = ranks(leaves_while_waited_for, 3)
    assert message.count("rank 2 has left") == 2, message


def too_late(world: World) -> list:
    message = []
    group = dist.new_group(backend="shm")
    group.set_timeout(timedelta(seconds=0.3))
    pending = dist.new_group(backend="shm")
    if world.rank == 0:
        for call in (lambda: dist.recv(torch.ones(2), 1, group=group), lambda: dist.barrier(group)):
            try:
                call()
            except dist.DistBackendError as error:
                message.append(str(error))
        work = dist.all_reduce(torch.ones(2), group=pending, async_op=True)
        for _ in range(2):  # waiting in vain does no harm
            try:
                work.wait(timedelta(milliseconds=50))
            except dist.DistBackendError as error:
                message.append(str(error))
    dist.barrier()
    if world.rank == 0:
        work.wait()
    else:
        dist.all_reduce(torch.ones(2), group=pending)
    return message


def test_a_timed_out_operation_names_the_missing_ranks(ranks):
    message, nothing = ranks(too_late, 2)
    assert nothing == []
    assert "rank 1 did not send under tag 0" in message[0]
    assert "rank 1 did not come to operation 1" in message[1]
    assert message[2] == message[3] == "the operation has not ended after 0.05 s"


def monitored(world: World) -> list:
    message = []
    for present in ((0, 1, 2), (0, 2)):
        group = dist.new_group(backend="shm")
        if world.rank in present:
            try:
                group.monitored_barrier(timedelta(seconds=2 if len(present) == 2 else 30), True)
                message.append("passed")
            except RuntimeError as error:
                message.append(str(error))
    dist.barrier()
    return message


def test_a_monitored_barrier_names_the_missing_ranks(ranks):
    zero, one, two = ranks(monitored, 3)
    assert one == ["passed"]
    assert zero == ["passed", "rank 1 failed to pass monitored_barrier in 2000 ms"]
    assert two[0] == "passed" and "rank 1 failed to pass monitored_barrier" in two[1]


def used_wrongly(world: World) -> list:
    group, message = dist.new_group(backend="shm"), []
    for call in (
        lambda: dist.all_reduce(torch.ones(4, 4)[:, 1], group=group),
        lambda: dist.all_reduce(torch.ones(2).to_sparse(), group=group),
        lambda: Reduction(dist.ReduceOp.PREMUL_SUM),
        lambda: group.alltoall([torch.ones(1)], [torch.ones(1)]),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group),
        lambda: group.send([torch.ones(1)], world.rank, 0),
        lambda: group.reduce_scatter([torch.ones(2)], [[torch.ones(3)] * world.size]),
    ):
        try:
            call()
            message.append("no error")
        except (ValueError, RuntimeError) as error:
            message.append(str(error))
    x = torch.ones(1)
    dist.all_reduce(x, group=group)  # none of it has reached the others
    dist.destroy_process_group(group)
    try:
        group.barrier()
    except dist.DistBackendError as error:
        message.append(str(error))
    return [x.item(), *message]


def test_invalid_calls_are_refused_before_communication(ranks):
    for total, *message in ranks(used_wrongly, 2):
        assert total == 2.0
        expected = ["contiguous", "sparse", "PREMUL_SUM", "a tensor per rank", "cannot share", "no peer", "elements"]
        for text, word in zip(message, [*expected, "destroyed"], strict=True):
            assert word in text, message


def unequal_exchange(world: World) -> str:
    group = dist.new_group(backend="shm")
    sent, received = ([1, 2], [1, 1]) if world.rank == 0 else ([1, 1], [3, 1])
    try:
        dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_an_all_to_all_with_different_splits_names_both_ranks(ranks):
    for text in ranks(unequal_exchange, 2):
        assert "rank 0 has 8 bytes for rank 1, which expects 12" in text


def leaves_while_another_connects(world: World) -> str:
    """Rank 1 destroys the group when rank 0 is about to connect to it; its process serves another group and accepts."""
    dist.new_group(backend="shm")
    group = dist.new_group(backend="shm")
    transfers, others = group._resources.transfers, dist.group.WORLD
    if world.rank == 1:
        dist.barrier(others)
        dist.destroy_process_group(group)
        dist.barrier(others)
        return "left"
    refuse, calls = transfers._check_peer_open, []

    def refuse_then_wait(peer: int) -> None:
        refuse(peer)
        if not calls:
            calls.append(peer)
            dist.barrier(others)
            assert wait_until(lambda: peer in group._resources.barrier.departure_reasons)
            dist.barrier(others)

    transfers._check_peer_open = refuse_then_wait
    try:
        dist.send(torch.ones(5), 1, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_rank_that_leaves_while_another_connects_is_not_waited_for(ranks):
    assert "rank 1 has left group" in ranks(leaves_while_another_connects, 2, backend="gloo")[0]


class SlowToSend:
    """A socket that delays its messages by `seconds`, like a rank that gets no CPU time."""

    def __init__(self, sock, seconds: float):
        self._sock, self._seconds = sock, seconds

    def send(self, *args):
        time.sleep(self._seconds)
        return self._sock.send(*args)

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


def finishes_after_another_has_left(world: World) -> list:
    """Rank 1 is slow to reach rank 2. Rank 0, which has everything it needs, is long gone from the group by then."""
    group, x = dist.new_group(backend="shm"), torch.ones(3)
    barrier = group._resources.barrier
    if world.rank == 1:
        barrier.peers = [(other, SlowToSend(sock, 1.5) if other == 2 else sock) for other, sock in barrier.peers]
    dist.all_reduce(x, group=group)
    told = sorted(barrier.departure_reasons)
    if world.rank == 0:
        dist.destroy_process_group(group)
    dist.barrier()
    return [x.tolist(), told]


def test_an_operation_survives_ranks_that_have_finished_it_and_left(ranks):
    assert ranks(finishes_after_another_has_left, 3, backend="gloo") == [
        [[3.0] * 3, []], [[3.0] * 3, [0]], [[3.0] * 3, [0]]
    ]  # fmt: skip


def test_forgetting_a_process_that_has_ended_leaves_the_next_one_watched():
    """Its descriptor is closed when it ends, and the next file that is opened gets the same number."""
    here, ended = ProcessContext(), []
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        first = here.watch_process(children[0].pid, lambda: ended.append("first"))
        children[0].kill()
        assert wait_until(lambda: ended == ["first"])
        second = here.watch_process(children[1].pid, lambda: ended.append("second"))
        assert second.pidfd == first.pidfd
        here.unwatch_process(first)
        children[1].kill()
        assert wait_until(lambda: ended == ["first", "second"])
    finally:
        for child in children:
            child.kill()
            child.wait()
        here.add_group_reference()
        here.drop_group_reference()
