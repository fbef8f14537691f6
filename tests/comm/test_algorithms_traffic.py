"""The byte table, the meter and the kernel agree on what our algorithms send."""

import dataclasses
import socket
import sys
import threading

import pytest
import torch

from minidist import comm
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.algorithms import ALGORITHMS
from minidist.comm.wire_bytes import IMPLEMENTED_ALGORITHMS, sent_elements_by_algorithm
from minidist.mesh import Mesh
from minidist.tools.deadlock.nccl_rules import violations
from minidist.tools.network.sockets import count_tcp_bytes_sent
from tests.helpers.exhaustive import exhaustive

NAMES = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def traffic(world: World) -> list:
    """(operation, algorithm, n, dtype, what the meter saw sent) of everything, each in bytes."""
    group, seen = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"], []
    for name, algorithm in NAMES:
        for dtype in DTYPES:
            for n in (0, 3, 17) if dtype.is_floating_point else (1, 10):
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, *exhaustive(6, 7)])
def test_what_is_sent_is_what_the_table_says(ranks, size):
    for rank, seen in enumerate(ranks(traffic, size)):
        for name, algorithm, n, dtype, got in seen:
            whole = n * size if name in ("all_gather", "reduce_scatter", "all_to_all") else n
            want = sent_elements_by_algorithm(name, algorithm, whole, size, rank, root=n % size) * dtype.itemsize
            assert got == want, f"{algorithm} {name} of {n} {dtype}, rank {rank} of {size}"


def test_the_table_and_the_registry_name_the_same_algorithms():
    table = {name: set(algorithms) for name, algorithms in IMPLEMENTED_ALGORITHMS.items() if name != "central_update"}
    assert table == {name: set(algorithms) for name, algorithms in ALGORITHMS.items()}
    with pytest.raises(ValueError, match="no algorithm 'gossip' for 'all_reduce': there are broadcast: flat, tree; "):
        sent_elements_by_algorithm("all_reduce", "gossip", 1, 2, 0)


def logs(world: World) -> list:
    """The records of every algorithm, one after the other."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]
    for name, algorithm in NAMES:
        once_only(group, name, algorithm, 7, torch.float32, root=1)
    return group.meter.records


@pytest.mark.parametrize("size", [3, 4])
def test_transfers_that_are_in_flight_together_were_launched_together(ranks, size):
    """What NCCL demands and gloo does not: else two ranks that send to each other wait for ever."""
    of_rank = dict(enumerate(ranks(logs, size)))
    assert all(len(log) > 20 for log in of_rank.values()) and violations(of_rank) == []


def carried(world: World) -> list:
    """(operation, algorithm, elements, bytes the meter saw, bytes the kernel sent, transfers) on this rank."""
    group, seen, n = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"], [], 30_001
    for name, algorithm in NAMES:
        comm.barrier(group)
        records, metered, kernel = len(group.meter.records), group.meter.total_wire_bytes, count_tcp_bytes_sent()
        once_only(group, name, algorithm, n, torch.float32, root=1)
        metered, kernel = group.meter.total_wire_bytes - metered, count_tcp_bytes_sent() - kernel
        transfers = [r for r in group.meter.records[records:] if r.name in ("send", "recv")]
        seen.append((name, algorithm, metered, kernel, len(transfers)))
        comm.barrier(group)
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_kernel_sent_what_the_meter_counted(ranks, size):
    for seen in ranks(carried, size, backend="gloo"):
        for name, algorithm, metered, kernel, transfers in seen:
            # gloo sends 48 bytes before the data, 48 to say that there is some, and 48 to say that there is room for
            # it; messages of the barriers around it may still be in flight.
            over = kernel - metered
            assert 0 <= over <= 96 * transfers + 400, f"{algorithm} {name}, {size} ranks: {metered} bytes, {kernel}"


def library(world: World) -> dict:
    """Of the backend's own collectives, and of the package's in their place: bytes the kernel sent, and the table's."""
    ours, n, found = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"], 120_000, {}
    group = dataclasses.replace(ours)
    group.over_gloo = False  # so that the collectives ask the backend for all of them
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
def test_the_bytes_of_collectives_over_gloo_are_those_of_the_table_and_of_its_own_reduce_scatter_twice(ranks, size):
    for found in ranks(library, size, backend="gloo"):
        for name, (kernel, modelled) in found.items():
            want = modelled * (2 if name == "reduce_scatter" else 1)
            assert 0 <= kernel - want <= 0.01 * want + 1000, f"{name}: {kernel} sent, {modelled} modelled"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for its owner")
def test_the_kernel_is_asked_for_what_was_given_to_a_connection_even_if_nobody_reads_it():
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
