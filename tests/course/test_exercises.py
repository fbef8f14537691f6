"""Checking a learner's file: answers that pass, hang or die, the reports, and no side effects."""

from pathlib import Path

import pytest

from exercises import report, stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.check import check
from tests.helpers.exhaustive import exhaustive

CATALOGUE = Catalogue()
BLOCK, GRADIENTS = CATALOGUE["block_partition"], CATALOGUE["data_parallel"]
# One exercise of each kind; `make test-all` has the others.
ONE_OF_EACH = list({exercise.kind: name for name, exercise in CATALOGUE.items()}.values())
each_kind = pytest.mark.parametrize(
    "name", [*ONE_OF_EACH, *exhaustive(*(name for name in CATALOGUE if name not in ONE_OF_EACH))]
)
HEAD = "import numpy as np\n\n\ndef block_partition(n, world_size, rank):\n"


@each_kind
def test_a_solution_has_all_points(server, name):
    """That it passes every test, the gate checks for all exercises."""
    verdict = check(CATALOGUE[name], CATALOGUE[name].solution, server)
    assert verdict.passed and verdict.points == CATALOGUE[name].points


def test_an_answer_that_hangs_is_not_asked_again_and_what_passed_before_counts(check_answer):
    text = HEAD + (
        "    size, longer = divmod(n, world_size)\n"
        "    while longer: pass\n"
        "    return np.arange(rank * size, rank * size + size)\n"
    )
    verdict = check_answer(BLOCK, text)
    kinds = [result.finding and result.finding.kind for result in verdict.results]
    assert kinds == [None, "hang", "skipped", "skipped", "skipped"]
    assert verdict.points == 2


def test_a_deadlock_is_reported_with_who_waits_where(check_answer):
    text = stubs.solution_code(GRADIENTS).replace("import Group, all_reduce", "import Group, all_reduce, recv")
    text = text.replace("all_reduce(total, self.group)", "recv(total, 1 - self.group.rank, self.group)")
    verdict = check_answer(GRADIENTS, text, only=["unused_parameters"])
    finding = verdict.results[0].finding
    line = 1 + next(number for number, told in enumerate(text.splitlines()) if "recv(total" in told)
    assert (finding.kind, finding.test) == ("deadlock", "unused_parameters")
    assert finding.what.startswith("deadlock: ranks 0-1 wait for something that can never happen")
    for rank in (0, 1):
        assert f"rank {rank}: waiting in recv from rank {1 - rank} #1" in finding.what
    assert finding.what.count(f"data_parallel.py:{line}") == 2
    assert len(report.format_verdict(verdict, 3).splitlines()) <= report.MAX_LINES


def test_the_rank_that_loops_is_reported_from_those_that_wait_for_it(check_answer):
    sent = "all_reduce(total, self.group)"
    text = stubs.solution_code(GRADIENTS).replace(sent, f"while self.group.rank == 1: pass\n            {sent}")
    finding = check_answer(GRADIENTS, text, only=["unused_parameters"]).results[0].finding
    assert (finding.kind, finding.rank, finding.size) == ("hang", 1, 2)
    assert finding.source == "while self.group.rank == 1: pass"
    assert "rank 0: waiting in all_reduce" in finding.what and "rank 1: running" in finding.what


def test_the_rank_that_dies_is_reported_and_not_the_broken_connection(check_answer):
    text = stubs.solution_code(GRADIENTS).replace(
        "all_reduce(total, self.group)",
        "if self.group.rank: import faulthandler; faulthandler._sigsegv()\n            all_reduce(total, self.group)",
    )
    finding = check_answer(GRADIENTS, text, only=["unused_parameters"]).results[0].finding
    assert (finding.kind, finding.rank) == ("died", 1)
    assert finding.what == "your code ended its process: killed by SIGSEGV"


def test_ranks_that_call_different_things_are_reported(check_answer):
    text = stubs.solution_code(GRADIENTS).replace(
        "all_reduce(total, self.group)", "all_reduce(torch.ones(total.numel() + self.group.rank), self.group)"
    )
    verdict = check_answer(GRADIENTS, text, only=["unused_parameters"])
    assert verdict.results[0].finding.kind in ("deadlock", "network", "died", "raised")
    assert len(report.format_verdict(verdict, 3).splitlines()) <= report.MAX_LINES


def test_the_rank_with_the_wrong_result_is_named(check_answer):
    verdict = check_answer(GRADIENTS, stubs.generate_answer(GRADIENTS, "wrong_third_rank"), only=["sums_over_ranks"])
    assert (verdict.results[0].finding.rank, verdict.results[0].finding.size) == (2, 3)
    assert report.format_finding(verdict.results[0].finding) == [
        "the float32 gradient of weight, at [0]",
        "  rank      2 of 3",
        "  expected  [48.0, 51.0, 54.0]",
        "  got       [96.0, 102.0, 108.0]",
    ]


def test_a_class_of_the_package_may_not_be_inherited(check_answer):
    verdict = check_answer(GRADIENTS, stubs.generate_answer(GRADIENTS, "wrong_cheat"), only=["sums_over_ranks"])
    told = "your code uses minidist.simple.data_parallel.NaiveReducer: this is the code that you write here"
    assert report.format_finding(verdict.results[0].finding) == [told]


def test_a_refused_call_is_reported_although_the_answer_catches_it(check_answer):
    text = "from minidist.data import partition\n\n\ndef block_partition(*args):\n"
    text += "    try:\n        partition.block_partition(*args)\n"
    verdict = check_answer(BLOCK, text + "    except BaseException:\n        return None\n", only=["divides_evenly"])
    assert verdict.results[0].finding.kind == "forbidden"


def test_skips_prints_and_files_of_an_answer_do_not_affect_the_check(check_answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    check_answer(BLOCK, 'print("hello")\n' + stubs.generate_answer(BLOCK, "right_loop"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "block_partition.py"])


def test_stubs_and_solutions_are_what_the_package_generates():
    assert len(CATALOGUE) >= 5
    for exercise in CATALOGUE.values():
        assert not stubs.outdated_files(exercise)
        compile(stubs.generate_empty_answer(exercise), exercise.name, "exec")


def test_nothing_here_names_the_learners_folder():
    assert not [path for path in Path(ROOT, "exercises").rglob("*.py") if "/" + "work/" in path.read_text()]
