"""`python -m bench model`: contenders match one process, a wrong one is not timed, and the report."""

import dataclasses
import json

import numpy as np
import pytest

from bench import compare_model_parallel
from bench.__main__ import main
from bench.bootstrap import ConfidenceInterval
from bench.compare_model_parallel import MAX_RATIOS, BenchLayout, PairResult, compare_layout
from bench.model_parallel_contenders import OneProcess
from bench.time_contenders import single_process_steps
from bench.workload import WORKLOADS
from minidist.errors import RunError
from minidist.mesh import Mesh

TINY = WORKLOADS["tiny"]


# Number of pairs of a minidist contender and a baseline, by layout; half or more of them are of the simple engine.
NUM_PAIRS = {
    Mesh(tp=2): 7,
    Mesh(pp=2): 7,
    Mesh(cp=2): 10,
    Mesh(pp=2, tp=2): 5,
    Mesh(cp=2, tp=2): 5,
    Mesh(pp=2, cp=2): 5,
}


@pytest.mark.parametrize("mesh", NUM_PAIRS, ids=lambda mesh: BenchLayout(mesh, "").name)
def test_every_contender_takes_the_steps_of_one_process_and_is_timed(server, mesh):
    layout = BenchLayout(mesh, "gloo")
    results = compare_layout(server, layout, TINY, rounds=2, steps=1, with_memory=False)
    assert [(result.ours, result.baseline) for result in results] == [
        (ours, baseline) for ours, baseline, _ in MAX_RATIOS if {ours, baseline} <= layout.makers().keys()
    ]
    assert len(results) == NUM_PAIRS[mesh] and all(
        result.ours_s > 0 and result.ratio.low <= result.ratio.median for result in results
    )
    assert {result.max_ratio for result in results} <= {0.9, 0.85, 0.95, None}  # no communication has no limit on gloo


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_one_axis_of_four_ranks_is_measured_too(server, axis):
    # torch's DTensor cannot divide two key-value heads by four ranks.
    work = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, num_kv_heads=4))
    layout = BenchLayout(Mesh(**{axis: 4}), "gloo")
    assert compare_layout(server, layout, work, rounds=1, steps=1, with_memory=False)


def take_step_of_one_process(world):
    return OneProcess(TINY, world).step(compare_model_parallel.global_batches(TINY)[0])


def test_one_process_trains_on_the_whole_batch_on_rank_0_only(server):
    trained, idle = server.run(take_step_of_one_process, 2, threads=1).values
    (reference, *_) = single_process_steps(TINY)
    assert idle is None and trained == pytest.approx((reference.loss, reference.grad_norm), rel=1e-5)


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
    with pytest.raises(RunError, match=r"tp is .* off a single process in step 0 of tp2, gloo, so"):
        server.run(turns_off, 2, (BenchLayout(Mesh(tp=2), "gloo"), TINY, 1, 1), threads=1)


def test_a_verdict_is_the_medians():
    def result(median, max_ratio):
        ratio = ConfidenceInterval(median, median - 0.1, median + 0.1)
        return PairResult("c", "tp", "DTensor", 1.0, 1.0, ratio, ratio, max_ratio)

    assert [result(*one).verdict for one in ((0.9, 0.9), (0.91, 0.9), (2.0, None))] == ["met", "MISSED: <= 0.90", ""]


def test_the_command_writes_its_figures(server, tmp_path, capsys):
    file = tmp_path / "model.json"
    arguments = ["--rounds", "1", "--steps", "1", "--backend", "gloo", "--only", "cp2", "--json", str(file)]
    assert compare_model_parallel.main(arguments, server, TINY) == 0
    figures = json.loads(file.read_text())
    results = {(result["ours"], result["baseline"]): result for result in figures["results"]}
    assert len(results) == 10 and {result["layout"] for result in figures["results"]} == {"cp2, gloo"}
    assert figures["machine"]["torch"] and figures["workload"]["parameters"] == TINY.model.num_parameters()
    assert np.isfinite([result["ratio"][0] for result in figures["results"]]).all()
    # At least parameters, gradients and AdamW's two states, all in float32; one process has all activations, too.
    result = results["ring simple", "one process"]
    assert 16 * TINY.model.num_parameters() < result["ours_bytes"] < result["baseline_bytes"]
    assert "ring simple" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rounds", "0"], "at least 1 round of 1 step"),
        (["--steps", "0"], "at least 1 round of 1 step"),
        (["--ranks", "5"], "5: the meshes are tp2, pp2, cp2, tp4"),
        (["--only", "tp3"], "tp3: the meshes are"),
        (["--ranks", "2", "--only", "tp4"], "--only selects among --ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused(server, arguments, problem, capsys):
    assert main(["model", *arguments], server) == 2
    assert problem in capsys.readouterr().err
