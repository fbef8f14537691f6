"""`python -m bench comm` measures both backends in one run and evaluates the measurements."""

import json
import sys

import matplotlib.image
import numpy as np
import pytest

from bench import compare_backends, time_backends
from bench.__main__ import main as bench
from bench.backend_report import OperationResult
from bench.bootstrap import ConfidenceInterval
from bench.workload import WORKLOADS
from minidist.errors import RunError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")

MIB = 2**20


def test_one_run_measures_operations_and_steps_on_both(server, tmp_path, capsys):
    options = ["--ranks", "2", "--rounds", "2", "--sizes", "3", "--steps", "1"]
    files = {"json": tmp_path / "comm.json", "picture": tmp_path / "comm.png"}
    paths = [f"--{name}={path}" for name, path in files.items()]
    assert compare_backends.main([*options, *paths], server, WORKLOADS["tiny"]) == 0
    found = json.loads(files["json"].read_text())
    rows = {(row["name"], row["bytes"]): row for row in found["results"]}
    small, large = {("all_reduce", 4096), ("all_reduce", 262144)}, {"all_reduce", "reduce_scatter", "all_gather"}
    assert rows.keys() == small | {(name, 4 * MIB) for name in large | {"send_recv"}} | {("DDP", 0), ("FSDP2", 0)}
    assert all(row["gloo_s"] > 0 and row["shm_s"] > 0 for row in rows.values())
    assert found["losses"]["DDP gloo"] == found["losses"]["DDP shm"]  # two ranks: bit for bit
    assert found["losses"]["FSDP2 gloo"] == found["losses"]["FSDP2 shm"]
    assert "all_reduce" in capsys.readouterr().out
    picture = matplotlib.image.imread(files["picture"])
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10


def result(name, size, ratio, copy_ratio=None, ranks=2):
    ratio, copy_ratio = (value and ConfidenceInterval(value, value, value) for value in (ratio, copy_ratio))
    return OperationResult(ranks, name, size, 2.0, 1.0, ratio, ratio, copy_ratio)


@pytest.mark.parametrize(
    "one, verdict",
    [
        (result("all_reduce", 4096, 20.0, 9.0), "met"),
        (result("all_reduce", 4096, 19.9, 9.0), "MISSED: gloo / shm >= 20"),
        (result("all_reduce", 64 * MIB, 2.5, 1.5), "met"),
        (result("all_reduce", 64 * MIB, 2.4, 1.6), "MISSED: gloo / shm >= 2.5, shm / copy <= 1.5"),
        (result("all_reduce", 64 * MIB, 2.6, 2.0, ranks=4), "met"),
        (result("all_reduce", 64 * MIB, 2.6, 2.1, ranks=4), "MISSED: shm / copy <= 2"),
        (result("DDP", 0, 1.09), "MISSED: gloo / shm >= 1.1"),
        (result("send_recv", 4096, 1.0), ""),
    ],
)
def test_a_verdict_names_the_missed_targets(one, verdict):
    assert one.verdict == verdict


class Losing:
    """A rank server whose results over shm are wrong in the last digit."""

    def run(self, function, ranks, args, **_):
        spans = {(wrapper, b): [(0.0, 1.0, 0.5)] for wrapper in ("DDP", "FSDP2") for b in time_backends.BACKENDS}
        losses = {f"{wrapper} {b}": [1.0 + 1e-7 * (b == "shm")] for wrapper, b in spans}
        return type("Result", (), {"values": [(spans, losses)] * ranks})


def test_losses_that_differ_end_the_bench():
    with pytest.raises(RunError, match="DDP: the losses on shm are 1.0e-07 off"):
        compare_backends.compare_steps(Losing(), 2, 1, 1, None)
    assert (
        len(compare_backends.compare_steps(Losing(), 4, 1, 1, None)[0]) == 2
    )  # another order of addition is allowed there


def test_wrong_requests_are_refused(server, capsys):
    for options in (["--ranks", "1"], ["--rounds", "0"], ["--sizes", "5"], ["--steps", "-1"]):
        assert bench(["comm", *options], server) == 2
        assert "bench:" in capsys.readouterr().err
