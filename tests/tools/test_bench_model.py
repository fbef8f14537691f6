"""`python -m bench model`: contenders match one process, a wrong one is not timed, and the report."""

import json

import numpy as np
import pytest

from bench import compare_model_parallel
from bench.__main__ import main
from bench.bootstrap import ConfidenceInterval
from bench.compare_model_parallel import MAX_RATIOS, BenchLayout, PairResult, compare_layout
from bench.workload import WORKLOADS
from minidist.errors import RunError

TINY = WORKLOADS["tiny"]


@pytest.mark.parametrize("layout", [BenchLayout(2, "gloo"), BenchLayout(2, "gloo", 4)], ids=["tensor", "pipeline"])
def test_every_contender_takes_the_steps_of_one_process_and_is_timed(server, layout):
    results = compare_layout(server, layout, TINY, rounds=2, steps=1)
    assert [(result.ours, result.baseline) for result in results] == [
        (ours, baseline) for ours, baseline, _ in MAX_RATIOS if {ours, baseline} <= layout.makers().keys()
    ]
    assert len(results) == 7 and all(  # four of them of the simple engine
        result.ours_s > 0 and result.ratio.low <= result.ratio.median for result in results
    )
    assert {result.max_ratio for result in results} <= {0.9, 0.85, 0.95, None}  # half the batch has no limit on gloo


class Off:
    """A contender whose loss is a thousandth too large."""

    exact, kernel = True, "AdamW fused"

    def __init__(self, *_):
        pass

    def step(self, batch_range):
        return 5.6, 13.6


def turns_off(world, *args):
    compare_model_parallel.TENSOR_PARALLEL = {"tp": Off}
    return compare_model_parallel.check_and_time(world, *args)


def test_a_contender_that_computes_something_else_is_not_timed(server):
    with pytest.raises(
        RunError, match=r"tp is .* off a single process in step 0 of tensor parallel, 2 ranks, gloo, so"
    ):
        server.run(turns_off, 2, (BenchLayout(2, "gloo"), TINY, 1, 1), threads=1)


def test_a_verdict_is_the_medians():
    def result(median, max_ratio):
        ratio = ConfidenceInterval(median, median - 0.1, median + 0.1)
        return PairResult("c", "tp", "DTensor", 1.0, 1.0, ratio, ratio, max_ratio)

    assert [result(*one).verdict for one in ((0.9, 0.9), (0.91, 0.9), (2.0, None))] == ["met", "MISSED: <= 0.90", ""]


def test_the_command_writes_its_figures(server, tmp_path, capsys):
    file = tmp_path / "model.json"
    arguments = ["--rounds", "1", "--steps", "1", "--backend", "gloo", "--stages", "0", "--json", str(file)]
    assert compare_model_parallel.main(arguments, server, TINY) == 0
    figures = json.loads(file.read_text())
    assert [result["layout"] for result in figures["results"]] == ["tensor parallel, 2 ranks, gloo"] * 7
    assert figures["machine"]["torch"] and figures["workload"]["parameters"] == TINY.model.num_parameters()
    assert np.isfinite([result["ratio"][0] for result in figures["results"]]).all()
    assert "DTensor sequence" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--stages", "5"], ["--steps", "0"]])
def test_what_cannot_be_measured_is_refused(server, arguments, capsys):
    assert main(["model", *arguments], server) == 2
    assert "at least 1 round of 1 step, and 2 to 4 stages" in capsys.readouterr().err
