"""Messages about usual wrong answers to the exercises of chapter 07."""

import re

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check

EXERCISES = Catalogue()
# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("atomic_save", "wrong_index_not_synced"): (
        "crash_at_every_change",
        [
            "a folder that looks like a checkpoint",
            "  for       a crash after: rename step-00000007.partial; bytes that were not synced were lost",
            "  expected  whole or absent",
            "  got       index.json does not have the SHA-256 in its first line",
        ],
    ),
    ("resharding_load", "wrong_not_counted"): (
        "what_does_not_fit_is_refused",
        [
            "load must raise ErrorOnAnyRank on all ranks",
            "  for       the elements 3 to 7 of params/b were not saved",
            "  rank      0 of 2",
            "  expected  ErrorOnAnyRank",
            "  got       it returned",
        ],
    ),
    ("same_run_resume", "wrong_position_forgotten"): (
        "every_sample_in_its_turn",
        [
            "the samples, in order",
            "  for       stopped after steps 2 and 7; 3 samples per step",
            "  expected  [7, 1, 5, 4, 6, 3, 9, 0, 8, 2, 1, 7, 6, 3, 5, 2, 9, 4, 0, 8, 4, 1, 3, 7, 2, 9, 6, 8, 5, 0]",
            "  got       [7, 1, 5, 4, 6, 3, 7, 1, 5, 4, 6, 3, 9, 0, 8, 2, 1, 7, 6, 3, 5, 4, 6, 3, 9, 0, 8, 2, 1, 7]",
        ],
    ),
    ("save_interval", "wrong_young"): (
        "least_cost_per_second_of_work",
        [
            "the best interval",
            "  for       Llama 3: best_interval_s(10800.0, 30.0, 60.0)",
            "  expected  785.109791",
            "  got       804.984472",
        ],
    ),
    ("agreed_update", "wrong_without_its_part"): (
        "one_unusable_rank_stops_all",
        [
            "whether the ranks updated",
            "  for       rank 0 has no gradients; its tensors are full of 0.0",
            "  rank      0 of 2",
            "  expected  False",
            "  got       True",
        ],
    ),
    ("replica_digest", "wrong_half_is_a_majority"): (
        "majority_or_everyone",
        [
            "the result",
            "  for       another value on every rank",
            "  rank      0 of 2",
            "  expected  {'value': [0, 1]}",
            "  got       {'value': [1]}",
        ],
    ),
    ("replica_recovery", "wrong_step_skipped"): (
        "survivors_finish_the_step",
        [
            "weight after the last step, at [0]",
            "  for       process 1; process 0 of 2 is killed in step 1, before its all-reduce",
            "  expected  [0.475722, 0.600519, 0.773665]",
            "  got       [0.484297, 0.609311, 0.765215]",
        ],
    ),
    ("replica_recovery", "wrong_mean_over_ranks"): (
        "parts_add_up_for_any_number_of_ranks",
        [
            "the sum of all parts",
            "  for       step 0, 5 samples on 2 ranks",
            "  expected  [[0.0, 0.0, 0.0], [13.2, 18.650000, -6.6]]",
            "  got       [[0.0, 0.0, 0.0], [12.291667, 17.15625, -6.145833]]",
        ],
    ),
    ("resume_that_is_another_run", "wrong_next_epoch"): (
        "resumed_run_is_the_same_run",
        [
            "the losses from step 4 on, at [0]",
            "  for       stopped after step 3, resumed until step 14",
            "  expected  0.349409",
            "  got       0.716043",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert [round_numbers(line) for line in report.format_finding(result.finding)] == told


def round_numbers(line: str) -> str:
    """Round long decimal fractions to six digits: the others depend on the order of sums."""
    return re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6f}", line)
