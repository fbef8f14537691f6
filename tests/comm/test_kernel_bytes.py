"""What the kernel says of the bytes that gloo's collectives send, compared with the model."""

import dataclasses
import socket
import sys
import threading

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.mesh import Mesh
from minidist.tools.network.sockets import bytes_between_ranks, count_tcp_bytes_by_connection, count_tcp_bytes_sent


def backend_bytes(world: World) -> dict:
    """{operation: (bytes the kernel sent, modelled bytes)} of gloo's collectives and of the package's replacements."""
    ours, n, found = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"], 120_000, {}
    group = dataclasses.replace(ours)
    group.uses_gloo = False  # every collective is then the backend's own
    whole, other, part = torch.ones(n), torch.ones(n), torch.ones(n // world.size)
    calls = {
        "all_reduce": lambda: comm.all_reduce(whole, group),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, group),
        "all_gather": lambda: comm.all_gather(other, part, group),
        "reduce_scatter, direct": lambda: comm.reduce_scatter(part, whole, ours),
        "all_gather, direct": lambda: comm.all_gather(other, part, ours),
        "broadcast": lambda: comm.broadcast(whole, 0, group),
        "all_to_all": lambda: comm.all_to_all(other, whole, group),
    }
    for name, call in calls.items():
        comm.barrier(group)
        modelled, kernel = group.meter.total_wire_bytes, count_tcp_bytes_sent()
        call()
        found[name] = count_tcp_bytes_sent() - kernel, group.meter.total_wire_bytes - modelled
        comm.barrier(group)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
@pytest.mark.parametrize("size", [2, 4])
def test_gloo_sends_the_modelled_bytes_and_twice_as_many_in_reduce_scatter(ranks, size):
    for found in ranks(backend_bytes, size, backend="gloo"):
        for name, (kernel, modelled) in found.items():
            expected = modelled * (2 if name == "reduce_scatter" else 1)
            assert 0 <= kernel - expected <= 0.01 * expected + 1000, f"{name}: {kernel} sent, {modelled} modelled"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
def test_count_tcp_bytes_sent_includes_unread_bytes():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            before = count_tcp_bytes_sent()
            mine.sendall(bytes(100_000))
            assert count_tcp_bytes_sent() - before == 100_000
            theirs.sendall(bytes(7))
            assert count_tcp_bytes_sent() - before == 100_007
            reader = threading.Thread(target=theirs.recv, args=(100_000, socket.MSG_WAITALL))
            reader.start()
            reader.join(30)
            assert count_tcp_bytes_sent() - before == 100_007 and not reader.is_alive()
            mine.sendall(b"")  # both are still open, and still the caller's


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
def test_bytes_for_which_the_peer_has_no_room_count():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            before = count_tcp_bytes_sent()
            mine.setblocking(False)
            written = mine.send(bytes(50_000_000))  # more than all buffers hold
            assert written < 50_000_000
            assert count_tcp_bytes_sent() - before == written


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_tcp_connections_count_each_by_its_addresses(family, host):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    one, other = socket.socketpair()  # not TCP, like the next one
    datagrams = socket.socket(family, socket.SOCK_DGRAM)
    with server, one, other, datagrams, socket.create_connection(server.getsockname()[:2]) as mine:
        theirs, _ = server.accept()
        with theirs:
            before = count_tcp_bytes_sent()
            one.sendall(bytes(1000))
            datagrams.sendto(bytes(1000), (host, 9))
            mine.sendall(bytes(30))
            theirs.sendall(bytes(7))
            counts = count_tcp_bytes_by_connection()
            addresses = mine.getsockname()[:2], mine.getpeername()[:2]
            assert counts[addresses] == 30 and counts[addresses[::-1]] == 7
            assert count_tcp_bytes_sent() - before == 37


def test_bytes_between_ranks_finds_the_receiver_of_every_connection():
    a, b, c, store, second = (("127.0.0.1", port) for port in (1, 2, 3, 4, 5))
    counts_by_rank = [
        {(a, b): 5, (a, c): 6, (second, b): 50},
        {(b, a): 7, (b, second): 0, (b, store): 100},
        {(c, a): 0},
    ]
    assert bytes_between_ranks(counts_by_rank) == [[0, 55, 6], [7, 0, 0], [0, 0, 0]]


def test_two_ranks_may_have_the_same_port_for_connections_to_different_ranks():
    listens_0, listens_1, listens_2, shared = (("127.0.0.1", port) for port in (1, 2, 3, 4))
    counts_by_rank = [
        {(listens_0, shared): 5},
        {(listens_1, shared): 6, (shared, listens_0): 7},
        {(shared, listens_1): 8},
    ]
    assert bytes_between_ranks(counts_by_rank) == [[0, 5, 0], [7, 0, 6], [0, 8, 0]]


def bytes_by_connection(world: World) -> tuple[dict, int]:
    """What this rank sends on each connection while rank r sends (r + 1) * 100,000 bytes to the next; and the total."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]
    sent, received = torch.ones((world.rank + 1) * 25_000), torch.ones((world.rank or world.size) * 25_000)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    comm.barrier(group)
    before, total = count_tcp_bytes_by_connection(), count_tcp_bytes_sent()
    comm.batch_send_recv([comm.P2POp("send", sent, right), comm.P2POp("recv", received, left)], group)
    after, total = count_tcp_bytes_by_connection(), count_tcp_bytes_sent() - total
    comm.barrier(group)
    return {addresses: count - before.get(addresses, 0) for addresses, count in after.items()}, total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
def test_connections_of_ranks_tell_who_sent_to_whom(ranks):
    counts_by_rank, totals = zip(*ranks(bytes_by_connection, 3, backend="gloo"), strict=True)
    sent = bytes_between_ranks(counts_by_rank)
    for rank, (row, total) in enumerate(zip(sent, totals, strict=True)):
        expected = (rank + 1) * 100_000
        assert 0 <= row[(rank + 1) % 3] - expected <= 2000 and row[rank] == 0 and row[(rank - 1) % 3] <= 2000
        assert sum(row) <= total <= sum(row) + 2000
