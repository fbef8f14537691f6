"""Messages about usual wrong answers to the exercises of chapter 04."""

import re

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check

EXERCISES = Catalogue()
# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("central_server", "wrong_whole_gradient_to_every_server"): (
        "no_link_carries_more_than_another",
        [
            "messages sent: (to rank, bytes)",
            "  for       sharded_step, 7 elements on 3 ranks",
            "  rank      0 of 3",
            "  expected  [[1, 8], [1, 12], [2, 8], [2, 12]]",
            "  got       [[1, 12], [1, 28], [2, 12], [2, 28]]",
        ],
    ),
    ("asynchronous_worker", "wrong_pulls_ahead"): (
        "pulls_and_pushes_in_turn",
        [
            "the requests",
            "  for       asynchronous_worker(compute, 1)",
            "  expected  ['Pull()', ['Push', [10.0, 0.0]]]",
            "  got       ['Pull()', 'Pull()', ['Push', [10.0, 0.0]]]",
        ],
    ),
    ("staleness_bound", "wrong_only_pulls_wait"): (
        "no_pull_sees_too_little_or_too_much",
        [
            "pushes of worker 1 that it sees",
            "  for       bound 0, requests in a random order: pull number 0 of worker 0",
            "  expected  0 to 0",
            "  got       1",
        ],
    ),
    ("local_sgd", "wrong_zero_times_nan"): (
        "weight_0_does_not_count",
        [
            "the parameters",
            "  for       weights [0.0, 2.0]; all values of rank 0 are nan",
            "  rank      0 of 2",
            "  expected  [-1.9, -0.4, 1.1, 2.6, 4.1]",
            "  got       [nan, nan, nan, nan, nan]",
        ],
    ),
    ("local_sgd", "wrong_own_distance"): (
        "drift_is_the_distance_from_the_mean",
        [
            "the drift on each rank",
            "  for       replicas [3, -4, 0] times 1, 4, 9",
            "  rank      0 of 3",
            "  expected  [16.499158, 16.499158, 16.499158]",
            "  got       [18.333333, 3.333333, 21.666667]",
        ],
    ),
    ("outer_step", "wrong_heavy_ball"): (
        "nesterov_on_the_averaged_difference",
        [
            "the parameters, at [0]",
            "  for       round 1, lr 0.7, momentum 0.9",
            "  expected  -0.867",
            "  got       -0.93",
        ],
    ),
    ("replica_merger", "wrong_one_model_always"): (
        "counts_between_merges",
        [
            "num_different_models at the start and after each step",
            "  for       h 2, 7 steps, no tokens in steps 2 and 3",
            "  rank      0 of 2",
            "  expected  [1, 2, 1, 2, 1, 2, 1, 1]",
            "  got       [1, 1, 1, 1, 1, 1, 1, 1]",
        ],
    ),
    ("drifting_replicas", "wrong_flattened"): (
        "replicas_are_equal_after_the_last_merge",
        [
            "weight of layer 0 at the end, at [0][0]",
            "  for       3 steps, h=3, weight of layer 0 stored transposed",
            "  rank      0 of 2",
            "  expected  0.027267",
            "  got       0.019709",
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
