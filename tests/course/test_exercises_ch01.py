"""Messages about answers of chapter 01 that give right values in a wrong way."""

import re

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check

EXERCISES = Catalogue()

# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("overlapped_reducer", "wrong_after_backward"): (
        "launched_inside_backward",
        [
            "what happens after: ready head",
            "  rank      0 of 2",
            "  expected  launch 0",
            "  got       ready second.weight",
        ],
    ),
    ("overlapped_reducer", "wrong_waits_at_once"): (
        "waits_at_the_end",
        [
            "waits inside backward",
            "  rank      0 of 2",
            "  expected  []",
            "  got       ['wait 0', 'wait 1', 'wait 2', 'wait 3']",
        ],
    ),
    ("overlapped_reducer", "wrong_copy_sent"): (
        "no_second_copy_of_gradients",
        [
            "at most 130 kB peak memory for gradients (measured: 180 kB)",
            "  for       80 kB of parameters",
            "  rank      0 of 2",
            "  expected  True",
            "  got       False",
        ],
    ),
    ("weighted_loss", "wrong_one_backward"): (
        "one_micro_batch_at_a_time",
        [
            "what happened",
            "  for       backward(loss_sums=<generator>, weight=1.0, count=<AsyncSum>)",
            "  expected  ['forward', 'backward', 'forward', 'backward', 'forward', 'backward']",
            "  got       ['forward', 'forward', 'forward', 'backward']",
        ],
    ),
    ("accumulation", "wrong_left_to_autograd"): (
        "partly_unused_parameters",
        [
            "the sum of the gradients of rare",
            "  for       micro-batches that use `rare`: [True, False, False]",
            "  expected  [-26.99981689453125, 7.5000457763671875]",
            "  got       None",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert report.format_finding(result.finding) == told


# Where the connections break before the mismatch is noticed, the message is another one.
@pytest.mark.process_lifecycle
def test_different_launch_orders_are_reported_without_internals(server, tmp_path):
    exercise, test = EXERCISES["overlapped_reducer"], "launched_in_index_order"
    answer = stubs.write_answer(exercise, "wrong_order_of_readiness", tmp_path)
    told = report.format_finding(check(exercise, answer, server, only=[test]).results[0].finding)
    # Which two of the ranks are compared first depends on which arrive first.
    assert re.search(r"is not the same on ranks ([0-3]) and (?!\1)[0-3]\b", told[0]) and "in the same order" in told[3]
    assert not any(word in " ".join(told) for word in ("FindingStored", "rankside", "SIGABRT"))
