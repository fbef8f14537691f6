"""A check imports what its ranks need once, in the rank server, and not again in every rank."""

import json

import pytest

from exercises import rank_tests, report
from exercises.catalogue import Catalogue
from exercises.check import CONDITIONS_TEST, check, modules_to_preload
from minidist.tools.launch import RankServer
from tests.helpers import rank_imports

CATALOGUE = Catalogue()
IN_THE_GATE = ("zero_stage_one", "region_operators")
MODULES = 20  # a rank loads the answer, its tests and a few modules that they alone use; sympy has 470
CASES = [pytest.param(name, marks=() if name in IN_THE_GATE else pytest.mark.exhaustive) for name in CATALOGUE]


@pytest.mark.parametrize("name", CASES)
def test_ranks_import_little_while_they_run_a_solution(name, tmp_path, monkeypatch):
    exercise = CATALOGUE[name]
    monkeypatch.setenv(rank_imports.FOLDER, str(tmp_path))
    monkeypatch.setattr(rank_tests, "run_tests", rank_imports.run_tests_and_note_imports)
    tests = [test.id for test in exercise.tests()]
    with RankServer(preload=modules_to_preload([exercise])) as server:
        verdict = check(exercise, exercise.solution, server, only=[tests[0], CONDITIONS_TEST])
    for result in verdict.results:
        assert result.finding is None, report.format_finding(result.finding)
    imported = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert imported
    for rank, modules in imported.items():
        say = (
            f"rank {rank} imported {len(modules)} modules, such as {modules[-3:]}; name what imports them in `imports`"
        )
        assert len(modules) <= MODULES, say
