"""The solutions of chapter 05 shard the model of a real run; the messages about usual wrong answers."""

import json

import pytest

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check
from exercises.learner_pieces import LearnerPiece
from minidist.errors import RunError
from tests.helpers.small_run import small_config, train_small, write_text

EXERCISES = Catalogue()
TOGETHER = {
    1: ["flat_parameter", "zero_stage_one"],
    2: ["flat_parameter", "zero_stage_one", "zero_stage_two"],
    3: ["flat_parameter", "zero_stage_one", "zero_stage_two", "zero_stage_three"],
}


def losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(name: str) -> LearnerPiece:
    exercise = EXERCISES[name]
    return LearnerPiece(name, exercise.pieces, "mine.py", exercise.solution.read_text())


@pytest.mark.parametrize("stage", TOGETHER)
def test_the_learners_zero_pieces_train_the_model(ranks, tmp_path, stage):
    text = write_text(tmp_path)

    def config(name, **change):
        return small_config(tmp_path / name, text, train__steps=2, model__num_layers=2, **change)

    ranks(train_small, 1, config("alone"))
    pieces = [piece(name) for name in TOGETHER[stage]]
    ranks(train.train_with_pieces, 3, config("learner", engine="simple", zero__stage=stage), pieces, TOGETHER[stage])
    one, mine = losses(tmp_path / "alone"), losses(tmp_path / "learner")
    assert len(one) == 2 and mine == pytest.approx(one, rel=1e-5)  # float32 sums in another order


def test_a_piece_of_a_later_stage_is_missed(ranks, tmp_path):
    with pytest.raises(RunError, match="no rank called zero_stage_three"):
        config = small_config(tmp_path / "run", write_text(tmp_path), train__steps=1, engine="simple", zero__stage=2)
        pieces = [piece("zero_stage_two"), piece("zero_stage_three")]
        ranks(train.train_with_pieces, 2, config, pieces, ["zero_stage_three"])


# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("flat_parameter", "wrong_places_in_the_buffer"): (
        "places_in_the_shard",
        [
            "the positions in the shard, and the parameter's elements there, by name",
            "  for       parameters {'a': (6,)}, 2 ranks",
            "  rank      1 of 2",
            "  expected  {'a': [[0, 3], [1, 4], [2, 5]]}",
            "  got       {'a': [[3, 3], [4, 4], [5, 5]]}",
        ],
    ),
    ("flat_parameter", "wrong_gather_waits"): (
        "gathers_and_frees",
        [
            "events up to the return of the first start_gather",
            "  rank      0 of 2",
            "  expected  ['launch 0']",
            "  got       ['launch 0', 'wait 0']",
        ],
    ),
    ("zero_stage_one", "wrong_all_reduced"): (
        "bytes_of_one_all_reduce",
        [
            "bytes that all ranks send in a step",
            "  for       1 micro-batch",
            "  rank      0 of 2",
            "  expected  2304 to 3024: (ranks - 1) times the gradients and parameters, and a few flags",
            "  got       3624",
        ],
    ),
    ("zero_stage_two", "wrong_reduced_after_backward"): (
        "full_gradients_of_one_block",
        [
            "KiB of tensors after the backward of 1 of 3 blocks, micro-batch 1 of step 1",
            "  for       2 ranks",
            "  rank      0 of 2",
            "  expected  about 288",
            "  got       370",
        ],
    ),
    ("zero_stage_three", "wrong_gone_in_backward"): (
        "equals_one_process",
        ["the backward of layers.2 begins, and its parameters have no memory"],
    ),
    ("zero_stage_three", "wrong_gathered_ahead_in_forward_only"): (
        "next_block_in_flight",
        [
            "the blocks that have memory",
            "  for       each block in forward, then in backward, prefetch=True, step 1",
            "  expected  [[0, 1], [1, 2], [2], [1, 2], [0, 1], [0]]",
            "  got       [[0, 1], [1, 2], [2], [2], [1], [0]]",
        ],
    ),
    ("unsaved_memory", "wrong_gradients_gathered_too"): (
        "no_more_bytes_than_an_all_reduce",
        [
            "bytes that all ranks send in a step",
            "  for       main(...)",
            "  rank      0 of 2",
            "  expected  3856 to 3872: (ranks - 1) x parameters for a reduce-scatter, as many for an all-gather",
            "  got       5808",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert report.format_finding(result.finding) == told


@pytest.mark.parametrize("answer", ["wrong_named_only", "wrong_cheat"])
def test_unsharded_states_are_reported_in_bytes(server, tmp_path, answer):
    exercise = EXERCISES["unsaved_memory"]
    file = stubs.write_answer(exercise, answer, tmp_path)
    [first, *_] = check(exercise, file, server, only=["states_are_sharded"]).results
    what, case, _, expected, got = report.format_finding(first.finding)
    assert what == "KiB that a rank stores between two steps" and case.endswith("parameters of 1875 KiB, 3 ranks")
    assert "at most 7187" in expected and int(got.split()[-1]) > 8100
