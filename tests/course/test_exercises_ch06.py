"""The solutions of chapter 06 train in fp16 with recomputation; messages about usual wrong answers."""

import json

import pytest

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check
from exercises.train import LearnerPiece
from minidist.errors import RunError
from tests.helpers.small_run import small_config, train_small, write_text

EXERCISES = Catalogue()
ROUTED = ["loss_scaler", "master_weights", "agreed_overflow", "recomputed_block"]


def rows(folder) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["loss_scale"]) for line in lines if "loss_scale" in line]


def piece(name: str) -> LearnerPiece:
    exercise = EXERCISES[name]
    return LearnerPiece(name, exercise.pieces, "mine.py", exercise.solution.read_text())


def test_the_learners_pieces_train_in_fp16(ranks, tmp_path):
    text = write_text(tmp_path)
    fp16 = {"precision__policy": "fp16", "precision__initial_scale": 2.0**24, "recompute": "block", "train__steps": 4}
    ranks(train_small, 2, small_config(tmp_path / "package", text, **fp16))
    pieces = [piece(name) for name in ROUTED]
    ranks(train.train_with_pieces, 2, small_config(tmp_path / "learner", text, **fp16), pieces)
    assert rows(tmp_path / "learner") == rows(tmp_path / "package")
    scales = [scale for _, scale in rows(tmp_path / "learner")]
    assert len(scales) == 4 and scales[-1] < scales[0]  # some steps overflowed, and others did not
    with pytest.raises(RunError, match="some rank never called"):
        plain = small_config(tmp_path / "plain", text, train__steps=1)
        ranks(train.train_with_pieces, 2, plain, [piece("loss_scaler")])


# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("loss_scaler", "wrong_count_goes_on"): (
        "every_change_restarts_the_count",
        [
            "the scale after each step (x: overflow)",
            "  for       initial_scale 65536, growth_interval 3; steps ..x..",
            "  expected  [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]",
            "  got       [65536.0, 65536.0, 32768.0, 65536.0, 65536.0]",
        ],
    ),
    ("agreed_overflow", "wrong_scale_halved_alone"): (
        "all_skip_or_none",
        [
            "the scale of each rank",
            "  for       the squared norm of rank 0 is inf",
            "  rank      0 of 2",
            "  expected  [512.0, 512.0]",
            "  got       [512.0, 1024.0]",
        ],
    ),
    ("accumulation_sends_once", "wrong_sent_every_time"): (
        "sends_once_per_step",
        [
            "messages between the first micro-batch and the last",
            "  for       step 1 of 2",
            "  rank      0 of 2",
            "  expected  0",
            "  got       6",
        ],
    ),
    ("recomputed_block", "wrong_messages_again"): (
        "repeats_collectives_in_order",
        [
            "bytes of each message in backward",
            "  for       with_recomputation(run=<function>)",
            "  rank      0 of 2",
            "  expected  [192, 144, 96]",
            "  got       [192, 192, 192, 192, 192, 144, 144, 144, 144, 144, 96, 96, 96]",
        ],
    ),
    ("lost_gradients", "wrong_widened_for_the_wire"): (
        "every_sample_counts_equally",
        [
            "the masters after a step of 0.5",
            "  for       512 equal samples",
            "  expected  [[[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]]",
            "  got       [[[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]]]",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert report.format_finding(result.finding) == told


def test_torchs_own_recomputation_is_refused(server, tmp_path):
    for answer in ("wrong_ready_made", "wrong_partial_of_torchs"):
        file = stubs.write_answer(EXERCISES["recomputed_block"], answer, tmp_path)
        [result] = check(EXERCISES["recomputed_block"], file, server, only=["equals_the_plain_block"]).results
        assert "torch.utils.checkpoint" in report.format_finding(result.finding)[0]
