"""Predictions of a notebook: scoring, and the progress file."""

import json
import os

import pytest
import torch

from minidist.errors import UserError
from minidist.tools.notebook import NEVER, CellResult, predict, score_prediction
from minidist.tools.notebook.predict import UnansweredError


@pytest.fixture
def file(tmp_path):
    return tmp_path / "work" / "progress.json"


def asked(file, answer, value, **options):
    predict("q", "How many bytes?", answer, unit="bytes", file=file)
    return score_prediction("q", value, file=file, **options)


def test_a_right_and_a_wrong_answer_are_scored(file):
    assert asked(file, 4000, 4000).score == 1
    assert asked(file.with_name("other.json"), 3999, 4000).score == 0


def test_no_answer_is_no_score_and_stops_nothing(file):
    prediction = predict("q", "How many bytes?", file=file)
    assert repr(prediction) == "How many bytes?"
    prediction = score_prediction("q", 12, file=file)
    assert prediction.score is None and prediction.answer is None
    assert repr(prediction) == "How many bytes?\nobserved: 12"


def test_an_answer_may_change_until_the_measurement(file):
    predict("q", "?", 1, file=file)
    predict("q", "?", 2, file=file)
    assert score_prediction("q", 2, file=file).score == 1


@pytest.mark.parametrize("first", [None, 7])
def test_an_answer_after_the_measurement_is_not_scored(file, first):
    asked(file, first, 12)
    late = predict("q", "How many bytes?", 12, unit="bytes", file=file)
    assert late.answer == first and late.score == (None if first is None else 0)
    assert "12 bytes was entered after the measurement and is not scored" in repr(late)
    assert score_prediction("q", 12, file=file).score == (None if first is None else 0)


def test_running_the_notebook_again_keeps_the_score(file):
    asked(file, 12, 12)
    again = predict("q", "How many bytes?", 12, unit="bytes", file=file)
    assert again.score == 1 and again.late_answer is None
    predict("q", "How many bytes?", None, file=file)
    assert score_prediction("q", 12, file=file).score == 1


@pytest.fixture
def typed(monkeypatch):
    """What a person types into the input fields, in this order; the labels of those that were shown are removed."""
    answers, labels = [], []
    monkeypatch.setitem(predict.__globals__, "_can_ask", lambda: True)
    monkeypatch.setitem(predict.__globals__, "_ASKED", set())
    monkeypatch.setattr("builtins.input", lambda label: labels.append(label) or answers.pop(0))
    return answers, labels


def test_an_unanswered_question_is_asked_and_its_answer_stored(file, typed):
    answers, labels = typed
    answers += [" 4,000 bytes "]
    assert predict("q", "How many bytes?", None, unit="bytes", file=file).answer == "4,000"
    assert repr(predict("q", "How many bytes?", None, unit="bytes", file=file)).endswith("you expect 4,000 bytes")
    assert labels == ["Your prediction, in bytes: "]
    assert score_prediction("q", 4000, file=file).score == 1
    assert predict("q", "How many bytes?", None, file=file).late_answer is None and not answers


def test_an_empty_field_stops_the_queue_once(file, typed):
    answers, labels = typed
    answers += [" "]
    with pytest.raises(UnansweredError, match="Run this cell again to go on without one"):
        predict("q", "?", None, file=file)
    assert predict("q", "?", None, file=file).answer is None and len(labels) == 1
    assert score_prediction("q", 4, file=file).score is None


def test_nobody_is_asked_who_has_answered_or_comes_after_the_measurement(file, typed):
    predict("q", "?", 3, file=file)
    score_prediction("q", 4, file=file)
    predict("q", "?", None, file=file)
    assert typed == ([], [])


@pytest.mark.parametrize("kind", ["deadlock", "quiet"])
def test_it_never_returns_is_an_answer(file, kind):
    result = CellResult(kind, [""], [""])
    assert asked(file, "It never  returns", result).score == 1
    other = file.with_name("other.json")
    assert asked(other, 3, result).score == 0
    assert f"observed: {NEVER}" in repr(score_prediction("q", result, file=other))
    assert asked(file.with_name("third.json"), NEVER, 3).score == 0


def test_a_cell_that_returned_has_no_value_of_its_own(file):
    predict("q", "?", 1, file=file)
    with pytest.raises(UserError, match="did return"):
        score_prediction("q", CellResult("done", [""], [""]), file=file)


def test_a_value_is_shown_with_how_it_was_had(file):
    assert "modelled: 12 bytes" in repr(asked(file, 12, 12, how="modelled"))
    with pytest.raises(UserError, match="observed, counted, modelled, simulated, computed"):
        score_prediction("q", 12, how="measured", file=file)


def test_a_measurement_without_its_question_is_refused(file):
    with pytest.raises(UserError, match="was not asked"):
        score_prediction("q", 1, file=file)


@pytest.mark.parametrize(
    ("answer", "value", "tolerance", "score"),
    [
        ("4,000", 4000, 0.0, 1),
        (4000.0, 4000, 0.0, 1),
        (102, 100, 0.05, 1),
        (110, 100, 0.05, 0),
        (-100, 100, 0.05, 0),
        (0, 0.0, 0.0, 1),
        (float("nan"), 1, 0.5, 0),
        (True, 1, 0.0, 0),
        ("many", 3, 0.0, 0),
        ([0, 2], [0, 2], 0.0, 1),
        ((2, 0), [0, 2], 0.0, 0),
        ({2, 0}, [0, 2], 0.0, 1),
        ([0], [0, 2], 0.0, 0),
        (2, [0, 2], 0.0, 0),
        (torch.tensor(3), 3, 0.0, 1),
        (torch.ones(2), [1, 1], 0.0, 1),
        ("Rank 1", "rank 1", 0.0, 1),
        ("rank 1", "rank 2", 0.0, 0),
        (object(), 3, 0.0, 0),
        (lambda: 3, 3, 0.0, 0),
        ("nan", float("nan"), 0.0, 1),
        (float("nan"), torch.zeros(0).mean(), 0.0, 1),
        (0, float("nan"), 0.0, 0),
        (float("inf"), float("inf"), 0.0, 1),
        ("never", NEVER, 0.0, 1),
        ("It never returns.", NEVER, 0.0, 1),
        (float("inf"), NEVER, 0.0, 1),
        (600, NEVER, 0.0, 0),
        ("4 and 1", [4.0, 1.0], 0.0, 1),
        ("[4, 1]", [4.0, 1.0], 0.0, 1),
        ("4", [4.0, 1.0], 0.0, 0),
        ("1, 4", [4.0, 1.0], 0.0, 0),
    ],
)
def test_answers_of_every_kind_are_scored(file, answer, value, tolerance, score):
    assert asked(file, answer, value, tolerance=tolerance).score == score
    json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_other_entries_of_the_progress_file_are_kept(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"exercises": {"block": "passed"}}))
    asked(file, 1, 1)
    kept = json.loads(file.read_text())
    assert kept["exercises"] == {"block": "passed"} and kept["predictions"]["q"]["score"] == 1
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", file.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"predictions": 3}', '{"predictions": {"q": {"odd": 1}}}'])
def test_a_file_that_cannot_be_read_stops_nobody(file, text):
    file.parent.mkdir()
    file.write_text(text)
    assert asked(file, 1, 1).score == 1
    assert json.loads(file.read_text())["predictions"]["q"]["score"] == 1


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch):
    asked(file, 1, 1)
    before = file.read_text()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        predict("other", "?", 1, file=file)
    assert file.read_text() == before
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", file.name]


def test_scores_are_kept_in_the_learners_folder_and_nowhere_else(tmp_path, monkeypatch):
    work, inside = tmp_path / "work", tmp_path / "work" / "chapters" / "00"
    for folder in (inside, work / "exercises"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(inside)
    predict("only here", "?", 1)
    assert score_prediction("only here", 1).score == 1 and not (work / "progress.json").exists()
    (work / "progress.json").write_text("{}")
    predict("kept", "?", 2)
    assert score_prediction("kept", 2).score == 1
    assert list(json.loads((work / "progress.json").read_text())["predictions"]) == ["kept"]
