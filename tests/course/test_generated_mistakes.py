"""Mistakes that are made in every solution: they die where they have an effect, and nothing else does."""

from types import SimpleNamespace

import pytest

from exercises import condition_report, generated_mistakes
from exercises.answers import read_answers
from exercises.catalogue import Catalogue
from exercises.check import CONDITIONS_TEST, check
from exercises.condition_report import run_conditions
from exercises.conditions import KEPT, USUAL

CATALOGUE = Catalogue()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["local_sgd", "central_server"])
def test_the_wrapper_alone_is_no_mistake(server, tmp_path, monkeypatch, name):
    nothing = {"none": ("nothing", "        return call(*args, **kwargs)")}
    monkeypatch.setattr(generated_mistakes, "_IN_FUNCTIONS", nothing)
    monkeypatch.setattr(generated_mistakes, "_IN_COLLECTIVES", nothing)
    [(_, program)] = generated_mistakes.make_mistakes(CATALOGUE[name]).values()
    file = tmp_path / f"{name}.py"
    file.write_text(program)
    assert check(CATALOGUE[name], file, server).passed


@pytest.mark.exhaustive
def test_a_mistake_without_effect_does_not_count(server, tmp_path, monkeypatch):
    kept = {"float64_result": generated_mistakes._IN_FUNCTIONS["float64_result"]}  # merge_replicas returns nothing
    monkeypatch.setattr(generated_mistakes, "_IN_FUNCTIONS", kept)
    monkeypatch.setattr(generated_mistakes, "_IN_COLLECTIVES", {})
    [outcome] = generated_mistakes.try_mistakes(CATALOGUE["local_sgd"], server, tmp_path)
    assert not outcome.killed_by and not outcome.has_effect


@pytest.mark.parametrize("mistake", ["first_group_again", "arguments_kept", "wrong_on_five_ranks"])
def test_conditions_notice_what_the_exercise_does_not_test(server, tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(generated_mistakes, "_IN_FUNCTIONS", {mistake: generated_mistakes._IN_FUNCTIONS[mistake]})
    monkeypatch.setattr(generated_mistakes, "_IN_COLLECTIVES", {})
    [outcome] = generated_mistakes.try_mistakes(CATALOGUE["local_sgd"], server, tmp_path)
    assert outcome.killed_by == CONDITIONS_TEST


@pytest.mark.exhaustive
def test_every_mistake_with_an_effect_dies(server, tmp_path):
    outcomes = generated_mistakes.try_mistakes(CATALOGUE["local_sgd"], server, tmp_path)
    alive = [one.mistake for one in outcomes if one.has_effect and not one.killed_by]
    assert sum(bool(one.killed_by) for one in outcomes) >= 10 and not alive


@pytest.mark.exhaustive
def test_the_report_says_which_conditions_refuse(server, tmp_path, monkeypatch, capsys):
    few = ("arguments_kept", "contiguous_only", "float64_result")  # one for a kind, and one without effect
    made = {name: mistake for name, mistake in generated_mistakes._IN_FUNCTIONS.items() if name in few}
    wrong = read_answers(CATALOGUE["local_sgd"]).wrong[:4]
    monkeypatch.setattr(condition_report, "read_answers", lambda exercise: SimpleNamespace(wrong=wrong))
    monkeypatch.setattr(generated_mistakes, "_IN_FUNCTIONS", made)
    monkeypatch.setattr(generated_mistakes, "_IN_COLLECTIVES", {})
    assert run_conditions([CATALOGUE["local_sgd"]], server, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    found = dict(zip([line[:26].strip() for line in lines], [line[26:].split() for line in lines], strict=True))
    refused, total = int(found["all"][0]), int(found["all"][2])
    assert refused >= 0.8 * total
    assert {int(found[kind][0]) > 0 for kind in (USUAL, "memory layouts", KEPT)} == {True}
