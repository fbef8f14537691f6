"""Messages about usual wrong answers of chapter 06."""

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check

EXERCISES = Catalogue()


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
    ("step_decision", "wrong_scale_halved_alone"): (
        "skips_on_all_ranks",
        [
            "the state of this rank's scaler",
            "  for       the squared norm of rank 0 is inf, which also asks to stop",
            "  rank      1 of 2",
            "  expected  {'scale': 32.0, 'good_steps': 0, 'overflowed': [64.0]}",
            "  got       {'scale': 128.0, 'good_steps': 0, 'overflowed': []}",
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
            "  for       three blocks, each of which calls all_reduce once",
            "  rank      0 of 2",
            "  expected  [192, 144, 96]",
            "  got       [192, 192, 144, 144, 96, 96]",
        ],
    ),
    ("scale_dependent_run", "wrong_first_mean_only"): (
        "first_update_is_full",
        [
            "the master after a first update of 0.5",
            "  for       steps skipped before it: 1",
            "  expected  [[-0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5]]",
            "  got       [[-0.7069, -0.7069, -0.7069, -0.7069, -0.7069, -0.7069, -0.7069, -0.7069, -0.7069, -0.7069]]",
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
