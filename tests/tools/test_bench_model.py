"""`python -m bench model`: contenders compute the same, a wrong one is not timed, and it says what it found."""

import json

import numpy as np
import pytest

from bench import model
from bench.__main__ import main
from bench.model import WANTED, Contest, Row, compare
from bench.statistics import Interval
from bench.workload import SIZES
from minidist.errors import RunError

TINY = SIZES["tiny"]


@pytest.mark.parametrize("contest", [Contest(2, "gloo"), Contest(2, "gloo", 4)], ids=["tensor", "pipeline"])
def test_every_contender_takes_the_steps_of_one_process_and_is_timed(server, contest):
    rows = compare(server, contest, TINY, rounds=2, steps=1)
    assert [(row.ours, row.theirs) for row in rows] == [
        (ours, theirs) for ours, theirs, _ in WANTED if {ours, theirs} <= contest.makers().keys()
    ]
    assert len(rows) == 3 and all(row.ours_s > 0 and row.ratio.low <= row.ratio.median for row in rows)
    assert {row.wanted for row in rows} <= {0.9, 0.85, 0.95, None}  # on gloo nothing is wanted of half the batch


class Off:
    """A contender whose loss is a thousandth too large."""

    exact, kernel = True, "AdamW fused"

    def __init__(self, *_):
        pass

    def step(self, at):
        return 5.6, 13.6


def turns_off(world, *args):
    model.TENSOR = {"tp": Off}
    return model.turns(world, *args)


def test_a_contender_that_computes_something_else_is_not_timed(server):
    with pytest.raises(RunError, match=r"tp is .* off one process in step 0 of tensor parallel, 2 ranks, gloo: it is"):
        server.run(turns_off, 2, (Contest(2, "gloo"), TINY, 1, 1), threads=1)


def test_a_verdict_is_the_medians():
    def row(median, wanted):
        ratio = Interval(median, median - 0.1, median + 0.1)
        return Row("c", "tp", "DTensor", 1.0, 1.0, ratio, ratio, wanted)

    assert [row(0.9, 0.9).verdict, row(0.91, 0.9).verdict, row(2.0, None).verdict] == ["ok", "wanted 0.90", ""]


def test_the_command_writes_its_figures(server, tmp_path, capsys):
    file = tmp_path / "model.json"
    arguments = ["--rounds", "1", "--steps", "1", "--backend", "gloo", "--stages", "0", "--json", str(file)]
    assert model.main(arguments, server, TINY) == 0
    figures = json.loads(file.read_text())
    assert [row["contest"] for row in figures["rows"]] == ["tensor parallel, 2 ranks, gloo"] * 3
    assert figures["machine"]["torch"] and figures["workload"]["parameters"] == TINY.model.num_parameters()
    assert np.isfinite([row["ratio"][0] for row in figures["rows"]]).all()
    assert "DTensor sequence" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--stages", "5"], ["--steps", "0"]])
def test_what_cannot_be_measured_is_refused(server, arguments, capsys):
    assert main(["model", *arguments], server) == 2
    assert "at least 1 round of 1 step, and 2 to 4 stages" in capsys.readouterr().err
