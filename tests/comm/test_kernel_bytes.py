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
from minidist.tools.network.sockets import count_tcp_bytes_by_connection, count_tcp_bytes_sent, match_connections


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


def send_to_every_rank(world: World) -> dict:
    """The bytes of this process by connection while it sends 10,000 bytes to rank 0, 20,000 to rank 1, ..."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))])["data"]

    def exchange(unit: int) -> None:
        sends = [
            comm.send(torch.zeros(unit * (peer + 1), dtype=torch.uint8), peer, group, async_op=True) for peer in peers
        ]
        for peer in peers:
            comm.recv(torch.zeros(unit * (world.rank + 1), dtype=torch.uint8), peer, group)
        for send in sends:
            send.wait()

    peers = [peer for peer in range(world.size) if peer != world.rank]
    exchange(1)  # opens the connections
    comm.barrier(group)
    before = count_tcp_bytes_by_connection()
    exchange(10_000)
    after = count_tcp_bytes_by_connection()
    comm.barrier(group)
    return {ports: count - before[ports] for ports, count in after.items() if ports in before}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
def test_connections_of_all_ranks_match_to_bytes_by_pair(ranks):
    matrix = match_connections(ranks(send_to_every_rank, 3, backend="gloo"))
    for sender, row in enumerate(matrix):
        for receiver, count in enumerate(row):
            wanted = 0 if sender == receiver else 10_000 * (receiver + 1)
            assert 0 <= count - wanted <= 1000, (sender, receiver, count)


def test_connections_match_by_their_ports_in_reverse_order():
    counts = [{(1, 2): 10, (3, 4): 20, (5, 99): 1000}, {(2, 1): 30}, {(4, 3): 40, (6, 0): 7}]
    assert match_connections(counts) == [[0, 10, 20], [30, 0, 0], [40, 0, 0]]
