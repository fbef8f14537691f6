"""Messages about answers of chapter 01 that give right values in a wrong way."""

import re

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check

EXERCISES = Catalogue()

# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("bucketed_reducer", "wrong_after_backward"): (
        "launched_inside_backward",
        [
            "what happens after: add head",
            "  rank      0 of 2",
            "  expected  launch 0",
            "  got       add second.weight",
        ],
    ),
    ("bucketed_reducer", "wrong_waits_at_once"): (
        "waits_at_the_end",
        [
            "waits inside backward",
            "  rank      0 of 2",
            "  expected  []",
            "  got       ['wait 0', 'wait 1', 'wait 2', 'wait 3']",
        ],
    ),
    ("bucketed_reducer", "wrong_copy_sent"): (
        "holds_under_every_condition",
        [
            "the peak of memory during the call grows, in bytes",
            "  for       arguments of each rank: layers=8, and then layers=16, on 1 rank",
            "  expected  by at most 176000",
            "  got       by 240000",
        ],
    ),
    ("token_count", "wrong_weight_on_the_loss_only"): (
        "weights_of_data",
        [
            "the weighted number of tokens",
            "  for       weights [1.5, 0.25, 2.0, 1.0], tokens per micro-batch [[2, 5], [1, 3], [4, 0, 2], [9, 7]]",
            "  rank      0 of 4",
            "  expected  39.5",
            "  got       33.0",
        ],
    ),
    ("data_parallel", "wrong_used_by_all"): (
        "unused_parameters",
        [
            "the gradient of a parameter that only rank 1 used, in step 1",
            "  rank      0 of 2",
            "  expected  [3.0, 4.0]",
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
    exercise, test = EXERCISES["bucketed_reducer"], "launched_in_index_order"
    answer = stubs.write_answer(exercise, "wrong_order_of_readiness", tmp_path)
    told = report.format_finding(check(exercise, answer, server, only=[test]).results[0].finding)
    # Which two of the ranks are compared first depends on which arrive first.
    assert re.search(r"is not the same on ranks ([0-3]) and (?!\1)[0-3]\b", told[0]) and "in the same order" in told[3]
    assert not any(word in " ".join(told) for word in ("FindingStored", "rankside", "SIGABRT"))
