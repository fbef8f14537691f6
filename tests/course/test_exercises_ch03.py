"""The solutions of chapter 03 reduce the gradients of a real run; messages about usual wrong answers."""

import json

import pytest

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check
from exercises.train import LearnerPiece
from minidist.errors import RunError
from minidist.tools.launch.run import train_and_report
from tests.helpers.small_run import small_config, write_text

EXERCISES = Catalogue()
ROUTED = {
    "ring": ["ring_all_reduce"],
    "tree": ["tree_broadcast"],
    "doubling": ["halving_doubling"],
}


def losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(name: str, change=lambda text: text) -> LearnerPiece:
    """The solution of an exercise with some text replaced."""
    exercise = EXERCISES[name]
    return LearnerPiece(name, exercise.pieces, "mine.py", change(exercise.solution.read_text()))


@pytest.mark.parametrize("algorithm", ROUTED)
def test_the_learners_pieces_reduce_the_gradients(ranks, tmp_path, algorithm):
    text = write_text(tmp_path)

    def config(name):
        simple = {"engine": "simple", "comm__gradients": "naive", "comm__algorithm": algorithm}
        return small_config(tmp_path / name, text, train__steps=2, **simple)

    ranks(train_and_report, 3, config("package"))
    ranks(train.train_with_pieces, 3, config("learner"), [piece(name) for name in ROUTED[algorithm]])
    assert len(losses(tmp_path / "learner")) == 2 and losses(tmp_path / "learner") == losses(tmp_path / "package")
    with pytest.raises(RunError, match="no rank called any of your pieces"):
        backend = small_config(tmp_path / "backend", text, train__steps=1)
        ranks(train.train_with_pieces, 2, backend, [piece(name) for name in ROUTED[algorithm]])


# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("tree_broadcast", "wrong_flat"): (
        "number_of_rounds_is_minimal",
        [
            "rounds until the last rank has the tensor",
            "  for       tree_broadcast(tensor=[100.0, 101.0, 102.0], src=0, group=<Group>)",
            "  rank      0 of 4",
            "  expected  2",
            "  got       3",
        ],
    ),
    ("ring_all_reduce", "wrong_rest_left_out"): (
        "sizes_that_do_not_divide",
        [
            "the sum of 3 elements",
            "  for       ring_all_reduce(tensor=[0.0, 3.0, 6.0], group=<Group>, op='sum')",
            "  rank      0 of 2",
            "  expected  [1.0, 8.0, 15.0]",
            "  got       [1.0, 8.0, 6.0]",
        ],
    ),
    ("ring_all_reduce", "wrong_ready_made"): ("all_ranks_get_the_sum", None),
    ("drifting_elements", "wrong_whole_row_in_each_round"): (
        "messages_follow_the_ring",
        [
            "elements that all ranks send in a step",
            "  for       main(...) with 241 parameters",
            "  rank      0 of 3",
            "  expected  964, or 972 with padded chunks",
            "  got       2892",
        ],
    ),
    ("bucket_overlap", "wrong_early_bucket_overtakes"): (
        "matches_the_reducer",
        [
            "gradients that are ready when each bucket starts (the trainer's reducer launches after [10, 10, 12, 12])",
            "  for       bucket_intervals(ready_s=[10, 9, 12, 11], durations_s=[0, 0, 0, 0])",
            "  rank      0 of 2",
            "  expected  [10, 10, 12, 12]",
            "  got       [10, 9, 12, 11]",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    message = report.format_finding(result.finding)
    if told is None:
        assert result.finding.kind == "forbidden" and "calls torch.distributed.all_reduce" in message[0]
    else:
        assert message == told
