"""The byte table, the meter and the kernel agree on what our algorithms send."""

import os
import socket
import struct
import sys

import pytest
import torch

from minidist import comm
from minidist.comm import Meter, Use, World, bind
from minidist.comm.algorithms import ALGORITHMS
from minidist.comm.convention import OWN, sent_by
from minidist.mesh import Mesh

NAMES = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]


def traffic(world: World) -> list:
    """(operation, algorithm, n, dtype, what the meter saw sent) of everything, each in bytes."""
    group, seen = bind(world, Mesh(dp=world.size), [Use("data", ("dp",))], meter=Meter())["data"], []
    for name, algorithm in NAMES:
        for dtype in (torch.float32, torch.float16, torch.int64):
            for n in (0, 1, 3, 10, 17):
                before = group.meter.total_wire_bytes
                once_only(group, name, algorithm, n, dtype, root=n % world.size)
                seen.append((name, algorithm, n, dtype, group.meter.total_wire_bytes - before))
    assert all(record.name in ("send", "recv") and not record.modelled for record in group.meter.records)
    return seen


def once_only(group, name, algorithm, n, dtype, root) -> None:
    """The operation alone, without a check that would send more."""
    run, p = ALGORITHMS[name][algorithm], group.size
    mine = torch.ones(n, dtype=dtype)
    match name:
        case "broadcast" | "reduce":
            run(mine, root, group)
        case "all_reduce":
            run(mine, group)
        case "all_gather":
            run(torch.empty(p * n, dtype=dtype), mine, group)
        case "reduce_scatter":
            run(mine, torch.ones(p * n, dtype=dtype), group)
        case "all_to_all":
            run(torch.empty(p * n, dtype=dtype), torch.ones(p * n, dtype=dtype), group)


@pytest.mark.parametrize("size", range(1, 9))
def test_what_is_sent_is_what_the_table_says(ranks, size):
    for rank, seen in enumerate(ranks(traffic, size)):
        for name, algorithm, n, dtype, got in seen:
            whole = n * size if name in ("all_gather", "reduce_scatter", "all_to_all") else n
            want = sent_by(name, algorithm, whole, size, rank, root=n % size) * dtype.itemsize
            assert got == want, f"{algorithm} {name} of {n} {dtype}, rank {rank} of {size}"


def test_the_table_and_the_registry_name_the_same_algorithms():
    table = {name: set(algorithms) for name, algorithms in OWN.items() if name != "central_update"}
    assert table == {name: set(algorithms) for name, algorithms in ALGORITHMS.items()}
    with pytest.raises(ValueError, match="no algorithm 'gossip' for 'all_reduce': there are broadcast: flat, tree; "):
        sent_by("all_reduce", "gossip", 1, 2, 0)


def bytes_sent_by_sockets() -> int:
    """What this process has given to its TCP connections, by Linux's own account (`struct tcp_info` of linux/tcp.h).

    Counted per connection, not on the loopback interface: that would count whatever else runs on this machine.
    """
    total = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        if not _is_socket(fd):
            continue
        connection = socket.socket(fileno=fd)
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                (waiting,), (sent, again) = struct.unpack_from("<I", info, 144), struct.unpack_from("<QQ", info, 200)
                total += sent - again + waiting  # bytes_sent, bytes_retrans, notsent_bytes
        finally:
            connection.detach()  # it is gloo's
    return total


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # it was the folder's own
        return False


def carried(world: World) -> list:
    """(operation, algorithm, elements, bytes the meter saw, bytes the kernel sent, transfers) on this rank."""
    group, seen, n = bind(world, Mesh(dp=world.size), [Use("data", ("dp",))], meter=Meter())["data"], [], 30_001
    for name, algorithm in NAMES:
        comm.barrier(group)
        records, metered, kernel = len(group.meter.records), group.meter.total_wire_bytes, bytes_sent_by_sockets()
        once_only(group, name, algorithm, n, torch.float32, root=1)
        metered, kernel = group.meter.total_wire_bytes - metered, bytes_sent_by_sockets() - kernel
        transfers = [r for r in group.meter.records[records:] if r.name in ("send", "recv")]
        seen.append((name, algorithm, metered, kernel, len(transfers)))
        comm.barrier(group)
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_kernel_sent_what_the_meter_counted(ranks, size):
    for seen in ranks(carried, size):
        for name, algorithm, metered, kernel, transfers in seen:
            # gloo sends 48 bytes before the data, 48 to say that there is some, and 48 to say that there is room for
            # it; messages of the barriers around it may still be on their way.
            over = kernel - metered
            assert 0 <= over <= 96 * transfers + 400, f"{algorithm} {name}, {size} ranks: {metered} bytes, {kernel}"
