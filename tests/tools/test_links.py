"""The doctor's links: every backend has a line, with figures measured on it or the reason why it has none."""

import re
import sys

import pytest
import torch

from minidist.tools.network import link_report
from minidist.tools.network import link_speed as measured
from minidist.tools.network.link_report import explain_unavailable_backend, format_link_speed, report_link_speeds

FIGURES = re.compile(
    r"(\w+): message [1-9]\d* us, [\d.e+]+ GB/s = [\d.]+ copies; "
    r"all-reduce [1-9]\d* us, [\d.e+]+ GB/s = [\d.]+ copies; a copy [\d.e+]+ GB/s"
)


GLOO, SHM, NCCL, SHARED_GPU = link_report.LINKS


def test_every_backend_has_a_line():
    head, *lines = report_link_speeds(large_bytes=2**20)
    assert head.startswith("2 ranks: 4 bytes in us, 1 MiB in GB/s (1e9 bytes sent by each rank)")
    names = ["gloo", "shm", "nccl", *(["shm on one GPU"] if torch.cuda.device_count() else [])]
    assert [line.partition(":")[0] for line in lines] == names
    gloo, shm, *_ = lines
    assert FIGURES.fullmatch(gloo)
    assert FIGURES.fullmatch(shm) if sys.platform == "linux" else "cannot share memory" in shm


def test_figures_in_words_are_those_that_were_measured():
    found = measured.LinkSpeed(20e-6, 4e-3, 50e-6, 8e-3, 2e-3, shared_memory=False)
    assert format_link_speed(found, 2, 4_000_000) == (
        "message 20 us, 1 GB/s = 2.0 copies; all-reduce 50 us, 0.5 GB/s = 4.0 copies; a copy 2 GB/s"
    )
    # Among four ranks each sends 1.5 times the tensor in an all-reduce, once in a message.
    assert "message 20 us, 1 GB/s" in format_link_speed(
        found, 4, 4_000_000
    ) and "us, 0.75 GB/s = 4" in format_link_speed(found, 4, 4_000_000)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_same_figures_of_the_backend_asked_for(ranks, backend, size):
    found = ranks(measured.measure_link_speed, size, 2**16, 2, backend=backend)
    assert len(set(found)) == 1 and all(value > 0 for name, value in vars(found[0]).items() if name != "shared_memory")
    assert found[0].shared_memory == (backend == "shm" and sys.platform == "linux")


def test_an_unavailable_backend_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert report_link_speeds([GLOO, NCCL])[1:] == [
        "gloo: not available: this torch has no gloo",
        "nccl: not available: this torch has no nccl",
    ]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(link_report, "count_gpus", lambda: 1)
    assert explain_unavailable_backend("nccl", 2) == "not measured: 2 ranks need a GPU each, and torch sees 1"


def test_a_backend_that_fails_or_is_another_is_reported_and_the_next_is_measured(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    _, gloo, shm = report_link_speeds([GLOO, SHM], large_bytes=2**16)
    assert gloo.startswith("gloo: does not run: ") and "\n" not in gloo
    assert FIGURES.fullmatch(shm) or "cannot share memory" in shm


class Server:
    """A rank server that measures nothing and remembers where it was asked to."""

    asked: list[tuple[str, str]] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, function, ranks, args, *, backend, device, deadline_s):
        self.asked.append((backend, device))
        return type(
            "Result", (), {"values": [measured.LinkSpeed(1e-5, 1e-2, 1e-5, 1e-2, 1e-3, shared_memory=False)] * ranks}
        )


def test_gpus_are_measured_where_there_are_some_and_a_backend_that_is_another_has_no_figures(monkeypatch):
    monkeypatch.setattr(link_report, "RankServer", Server)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for gpus, asked in ((1, [GLOO, SHM, SHARED_GPU]), (2, [GLOO, SHM, NCCL, SHARED_GPU])):
        Server.asked.clear()
        monkeypatch.setattr(link_report, "count_gpus", lambda gpus=gpus: gpus)
        lines = report_link_speeds()[1:]
        assert Server.asked == [link[1:] for link in asked]
        assert (
            len(lines) == 4
            and lines[3] == "shm on one GPU: not available: these ranks cannot share memory, and fall back to gloo"
        )
