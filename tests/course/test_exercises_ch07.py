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
            "  got       checkpoint.json is not complete",
        ],
    ),
    ("resharding_load", "wrong_not_counted"): (
        "what_does_not_fit_is_refused",
        [
            "load must raise DamagedError on all ranks",
            "  for       the elements 3 to 7 of params/b were not saved",
            "  rank      0 of 2",
            "  expected  DamagedError",
            "  got       it returned",
        ],
    ),
    ("same_run_resume", "wrong_position_from_the_step"): (
        "another_layout_goes_on",
        [
            "completed steps and consumed samples",
            "  for       saved with ZeRO stage 0, resumed with stage 1 and 8 samples per step",
            "  rank      0 of 2",
            "  expected  [2, 24]",
            "  got       [2, 16]",
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
    ("replica_recovery", "wrong_first_source"): (
        "newest_state_wins",
        [
            "the ranks that recover returns",
            "  for       rank 0 has completed 1 steps, the others 0",
            "  rank      0 of 2",
            "  expected  [1]",
            "  got       []",
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
