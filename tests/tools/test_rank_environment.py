"""Ranks started by hand with wrong variables: one message each, which names the variable, and no stack trace."""

import socket
import sys

import pytest

from tests.helpers.small_run import OPTIONS, Command, write_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses the loopback addresses of Linux")


@pytest.fixture
def start_ranks(tmp_path):
    """`start_ranks((0, 2), (1, 3))`: the output of processes with these RANK and WORLD_SIZE, which all must fail."""
    text = write_text(tmp_path)

    def start(*ranks, address="127.0.0.1", port=None, timeout_s=60):
        port = free_port() if port is None else port
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        options = (*OPTIONS, "--data.path", text, "--comm.timeout-s", timeout_s)
        commands = [
            Command("train", *options, folder=tmp_path, environ=place | {"RANK": str(rank), "WORLD_SIZE": str(size)})
            for rank, size in ranks
        ]
        try:
            codes = [command.end() for command in commands]
        finally:
            for command in commands:
                command.__exit__()
        assert all(code in (1, 2) for code in codes), codes
        return [command.output for command in commands]

    return start


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_an_unknown_address_and_a_port_out_of_range_are_refused_at_once(start_ranks):
    unknown, out_of_range = start_ranks((1, 2), address="nowhere.invalid"), start_ranks((0, 2), port=99999)
    assert "minidist: rank 1: nobody listens at MASTER_ADDR nowhere.invalid, MASTER_PORT " in unknown[0]
    assert "Give all ranks the address and port of rank 0" in unknown[0]
    assert out_of_range[0].startswith("minidist: MASTER_PORT is 99999; ports are numbers up to 65535.")
    assert len(unknown[0].splitlines()) == len(out_of_range[0].splitlines()) == 1


def test_ranks_with_different_ports_name_the_address_after_the_time_out(start_ranks):
    first, second = start_ranks((0, 2), timeout_s=2)[0], start_ranks((1, 2), timeout_s=2)[0]
    assert first.startswith("minidist: rank 1 of 2 did not start within 2 s. All ranks need MASTER_ADDR 127.0.0.1")
    assert "within 2 s: Connection refused. Give all ranks the address and port of rank 0" in second
    assert len(first.splitlines()) == len(second.splitlines()) == 1, first + second


def test_different_world_sizes_are_refused_on_both_ranks(start_ranks):
    for output in start_ranks((0, 2), (1, 3)):
        assert "rank 0 was started with WORLD_SIZE 2, rank 1 with WORLD_SIZE 3: give all of them the same" in output
        assert len(output.splitlines()) == 1, output


def test_two_processes_of_one_rank_are_refused(start_ranks):
    outputs = start_ranks((0, 3), (1, 3), (1, 3))
    assert sum("two of the 3 processes were started with RANK 1" in output for output in outputs) >= 2, outputs
    assert not any("Traceback" in output for output in outputs)
    (message,) = {
        output for output in start_ranks((0, 2), (0, 2), timeout_s=2) if "port" in output and "in use" in output
    }
    assert "or by another process with RANK 0" in message and len(message.splitlines()) == 1
