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
from minidist.tools.network.sockets import count_tcp_bytes_sent


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
