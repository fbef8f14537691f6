"""The exact messages about a learner's file: right, wrong, or unusable in any way."""

import json

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.testing import Finding, Wrong, expect
from tests.helpers.bad_blocks import BAD_ANSWERS, HEAD
from tests.helpers.exhaustive import exhaustive

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
# One exercise of each kind; `make test-all` has the others.
ONE_OF_EACH = list({exercise.kind: name for name, exercise in CATALOGUE.items()}.values())
each_kind = pytest.mark.parametrize(
    "name", [*ONE_OF_EACH, *exhaustive(*(name for name in CATALOGUE if name not in ONE_OF_EACH))]
)


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_messages_about_bad_answers(check_answer, name):
    text, expected = BAD_ANSWERS[name]
    verdict = check_answer(BLOCK, text, only=["divides_evenly"])
    assert report.format_finding(verdict.results[0].finding) == expected
    assert verdict.points == 0 and not verdict.passed


@pytest.mark.parametrize(
    "got, expected, told",
    [
        ([1, 2], [1, 2], None),
        ([1.0, 2.0], [1, 2], None),
        ([1, 2], [2, 1], ("sum", "[2, 1]", "[1, 2]")),
        (None, [1], ("sum", "[1]", "None")),
        (True, 1, ("sum", "1", "True")),
        (float("nan"), 1.0, ("sum", "1.0", "nan")),
        (list(range(200)), [*range(199), 0], ("sum, at [199]", "0", "199")),
        ([[0] * 60, [0] * 60], [[0] * 60, [0] * 59 + [1]], ("sum, at [1][59]", "1", "0")),
    ],
)
def test_the_first_difference_from_the_expected_value_is_shown(got, expected, told):
    if told is None:
        return expect("sum", got, expected)
    with pytest.raises(Wrong) as wrong:
        expect("sum", got, expected)
    assert (str(wrong.value), wrong.value.expected, wrong.value.got) == told


def test_the_last_printed_line_is_shown(check_answer):
    verdict = check_answer(BLOCK, HEAD + '    print("rank", rank)\n    return np.arange(n)\n', only=["divides_evenly"])
    assert report.format_finding(verdict.results[0].finding) == [
        "a block of equal size",
        "  for       block_partition(n=2, world_size=2, rank=0)",
        "  expected  [0]",
        "  got       [0, 1]",
        "  printed   rank 0",
    ]


def test_a_breakpoint_ends_the_check_and_shows_the_variables(check_answer):
    body = "    start = [n, rank]\n    try:\n        breakpoint()\n    except Exception:\n        return start\n"
    verdict = check_answer(BLOCK, HEAD + body)
    line = 1 + (HEAD + body).splitlines().index("        breakpoint()")
    assert report.format_finding(verdict.reported.finding) == [
        "breakpoint() ends a check, because nobody can type at a debugger there. Your variables at this line:",
        "  n = 1",
        "  world_size = 1",
        "  rank = 0",
        "  start = [1, 0]",
        "  for       block_partition(n=1, world_size=1, rank=0)",
        f"  line      {line}: breakpoint()",
    ]
    assert {result.finding.kind for result in verdict.results} == {"breakpoint", "skipped"}


def test_a_long_explanation_is_cut_and_the_facts_stay():
    finding = Finding("deadlock", "\n".join("abcdefghijklmnopqrst"), call="f(1)", line=3, source="x")
    told = report.format_finding(finding, 6)
    assert told == ["a", "b", "c", "...", "  for       f(1)", "  line      3: x"]


def test_the_verdict_for_programs_is_stable(check_answer):
    text = stubs.generate_answer(BLOCK, "wrong_ceiling")
    first, second = (json.dumps(report.as_json(check_answer(BLOCK, text))) for _ in range(2))
    assert first == second
    told = json.loads(first)
    assert told.keys() == {"exercise", "kind", "passed", "points", "of", "tests"}
    assert [test["id"] for test in told["tests"]] == [test.id for test in BLOCK.tests()]
    assert sum(test["points"] for test in told["tests"]) == told["points"] < told["of"] == BLOCK.points
    assert all(bool(test["message"]) == (test["points"] == 0) for test in told["tests"])


def test_the_report_of_a_wrong_answer(check_answer):
    verdict = check_answer(BLOCK, stubs.generate_answer(BLOCK, "wrong_rest_to_last"))
    assert report.format_verdict(verdict, 3) == "\n".join(
        [
            "block_partition: 5 of 10 points",
            "passed: divides_evenly, each_index_once",
            "failed: sizes_differ_by_at_most_one, more_ranks_than_samples, refuses_impossible_input",
            "",
            "sizes_differ_by_at_most_one: Block sizes differ by at most one, and the longer blocks come first.",
            "the sizes of the blocks",
            "  for       n=1, world_size=2",
            "  expected  [1, 0]",
            "  got       [0, 1]",
            "Next hint: python -m exercises hint block_partition (3 left)",
        ]
    )


def test_a_stub_of_an_older_version_is_reported(check_answer):
    old = stubs.generate_stub(BLOCK).replace(stubs.stub_version(stubs.generate_stub(BLOCK)), "00000000")
    assert "Your file started from an older stub" in report.format_verdict(check_answer(BLOCK, old))
    assert "older" not in report.format_verdict(check_answer(BLOCK, stubs.generate_stub(BLOCK)))


# How any file can be no program, and what the report says of it whatever the exercise is.
NO_PROGRAM = {
    "def main(:\n": "your file has a syntax error: invalid syntax",
    "import sys\nsys.exit(3)\n": "your code ends the program (sys.exit)",
    "x = 1\n": "your file must define ",
}


@pytest.mark.parametrize("text", NO_PROGRAM)
@each_kind
def test_a_file_that_is_no_program_is_reported_as_that(check_answer, name, text):
    exercise = CATALOGUE[name]
    measured = {test.id: [] for test in exercise.tests()}
    told = report.format_verdict(check_answer(exercise, text, measured=measured), 3).splitlines()
    assert len(told) <= report.MAX_LINES and any(line.startswith(NO_PROGRAM[text]) for line in told)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("def block_partition", "async def block_partition", "block_partition must not be `async def`"),
        ("    return", "    yield", "block_partition contains `yield`"),
    ],
)
def test_a_function_that_runs_nothing_is_named(check_answer, before, after, message):
    solution = stubs.solution_code(BLOCK)
    assert before in solution
    told = report.format_verdict(check_answer(BLOCK, solution.replace(before, after)))
    assert message in told and "runs nothing" in told


def test_warnings_of_libraries_are_not_what_the_code_printed(check_answer):
    lines = (
        '    import sys\n    print("mine", file=sys.stderr)\n    print("[W1125 12:00 cpu.cpp] low", file=sys.stderr)\n'
    )
    answer = stubs.solution_code(BLOCK).replace("    _check(n", lines + "    return None\n    _check(n")
    told = report.format_verdict(check_answer(BLOCK, answer))
    assert "mine" in told and "W1125" not in told
