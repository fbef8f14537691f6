"""Scripts, debugging exercises, predictions: the findings about a file that is no answer, and its surroundings."""

import dataclasses

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from minidist.errors import UserError

CATALOGUE = Catalogue()
SCRIPT, DEBUG, PREDICT = (CATALOGUE[name] for name in ("repaired_script", "falling_loss", "which_rank_hangs"))
NETWORK = "class Network(torch.nn.Module):\n    pass\n\n\n"
ROOT = "def device_and_backend(*args):\n    pass\n\n\ndef main(*args, **kwargs):\n    "
HEAD = "import os\n\nimport torch\nimport torch.distributed as dist\n\n\n"

# What `main` does when it is called, and what is told: kind, first line of the message, the line of the file if any.
BAD = {
    "nothing": ("pass", "type", "main must return the trained model", None),
    "a loop": ("while True: pass", "hang", "your code does not finish", "while True: pass"),
    "os._exit": ("os._exit(0)", "forbidden", "calls os._exit: an answer must not end its process", "os._exit(0)"),
    "sys.exit": ("raise SystemExit", "exit", "your code ends the program (sys.exit)", "raise SystemExit"),
    "a segfault": (
        "import faulthandler; faulthandler._sigsegv()",
        "died",
        "your code ended its process: killed by SIGSEGV",
        "import faulthandler; faulthandler._sigsegv()",
    ),
    "memory": ("torch.ones(1 << 40)", "memory", "needs more memory than a check allows", "torch.ones(1 << 40)"),
    "printing": (
        "while True: print('again')",
        "printing",
        "your code prints endlessly",
        "while True: print('again')",
    ),
    "a file": (
        "torch.save({}, 'model.pt')",
        "forbidden",
        "calls torch.save: an answer must not write files",
        "torch.save({}, 'model.pt')",
    ),
    "another place": (
        "dist.init_process_group('gloo', rank=0, world_size=4)",
        "wrong",
        "init_process_group waits for ever: its rank or world size is not the one that torchrun set",
        "dist.init_process_group('gloo', rank=0, world_size=4)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_messages_about_wrong_programs(check_answer, name):
    does, kind, what, source = BAD[name]
    text = HEAD + NETWORK.replace("pass", _network()) + ROOT + does + "\n"
    verdict = check_answer(SCRIPT, text, only=["joins_with_the_assigned_rank"])
    finding = verdict.results[0].finding
    assert finding.kind == kind and what in finding.what
    assert finding.source == (source or "")
    assert len(report.format_verdict(verdict, 3).splitlines()) <= report.MAX_LINES


def _network() -> str:
    """A class body with the requested shapes."""
    return (
        "def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(10, 20), torch.nn.Linear(20, 1)"
    )


@pytest.mark.parametrize(
    "exercise, text, told",
    [
        (SCRIPT, "def main(:\n", "your file has a syntax error: invalid syntax"),
        (SCRIPT, "import nowhere\n", "your code raised ModuleNotFoundError: No module named 'nowhere'"),
        (SCRIPT, HEAD + NETWORK, "your file must define device_and_backend"),
        (SCRIPT, HEAD + NETWORK.replace("Network", "Net") + ROOT + "pass", "your file must define Network"),
        (DEBUG, "def main(*args, **kwargs):\n    pass\n", "your file must define INVARIANT"),
        (PREDICT, "ANSWERS = {\n", "your file has a syntax error: '{' was never closed"),
        (PREDICT, "answers = {}\n", "your file must define ANSWERS"),
        (PREDICT, "ANSWERS = [1]\n", "ANSWERS must be a dict, as in the stub"),
        (PREDICT, "ANSWERS = {}\n", 'not answered yet: ANSWERS["one_skips_the_sum"]'),
        (PREDICT, 'ANSWERS = {"one_skips_the_sum": 2}\n', "an answer is a set of ranks, set() for none"),
        (PREDICT, 'ANSWERS = {"one_skips_the_sum": {"0"}}\n', "an answer is a set of ranks, set() for none"),
        (
            PREDICT,
            'ANSWERS = {"one_skips_the_sum": {0, 9}}\n',
            "there is no rank 9: this scenario runs on the ranks 0 ",
        ),
        (
            PREDICT,
            'ANSWERS = {"one_skips_the_sum": {-1}}\n',
            "there is no rank -1: this scenario runs on the ranks 0 to",
        ),
        (
            PREDICT,
            "class D(dict):\n    pass\n\n\nANSWERS = D()\n",
            "ANSWERS must be a dict, as in the stub",
        ),
    ],
)
def test_messages_about_unusable_files(check_answer, exercise, text, told):
    first = exercise.tests()[0].id
    verdict = check_answer(exercise, text, only=[first])
    assert verdict.results[0].finding.what.startswith(told)
    assert len(report.format_verdict(verdict, 3).splitlines()) <= report.MAX_LINES


def test_the_first_fault_of_the_script_is_reported_as_what_it_is(check_answer):
    verdict = check_answer(SCRIPT, stubs.generate_stub(SCRIPT), stop=True)
    told = report.format_finding(verdict.results[0].finding)
    assert told[0] == "init_process_group waits for ever: its rank or world size is not the one that torchrun set"
    assert told[2:4] == ["  expected  rank 0 of 1", "  got       rank 0 of 4"]
    assert "world_size=4, rank=0)" in told[4]


def test_ranks_that_wait_for_one_that_has_ended_are_reported_with_their_line(check_answer):
    text = stubs.generate_answer(DEBUG, "wrong_rank_0_left_out")
    verdict = check_answer(DEBUG, text, only=["replicas_stay_equal"])
    finding = verdict.results[0].finding
    line = 1 + next(number for number, told in enumerate(text.splitlines()) if "dist.all_reduce(tensor)" in told)
    end = 1 + next(number for number, told in enumerate(text.splitlines()) if "destroy_process_group" in told)
    assert finding.kind == "deadlock"
    assert f"falling_loss.py:{line}" in finding.what and f"falling_loss.py:{end}" in finding.what


def test_raw_calls_of_a_piece_are_on_the_status_page(check_answer):
    """A rank that leaves a collective of torch itself out is found from the rank status, not by waiting."""
    gradients = CATALOGUE["data_parallel"]
    text = stubs.solution_code(gradients).replace("import torch\n", "import torch\nimport torch.distributed as dist\n")
    assert "all_reduce(total, self.group)" in text
    text = text.replace("all_reduce(total, self.group)", "dist.all_reduce(total) if self.group.rank else None")
    verdict = check_answer(gradients, text, only=["unused_parameters"], hang_s=3600.0)
    finding = verdict.results[0].finding
    assert finding.kind == "deadlock" and "all_reduce" in finding.what and "data_parallel.py:" in finding.what


@pytest.mark.parametrize("kind", ["number", "text", "text with spaces", "number as text"])
def test_the_line_of_a_debugging_exercise_is_given_by_number_or_text(check_answer, kind):
    ((number, text),) = stubs.faulty_lines(DEBUG)
    assert text == DEBUG.fault
    assert stubs.generate_stub(DEBUG).splitlines()[number - 1].strip() == text
    told = {"number": number, "text": text, "text with spaces": f"    {text} "}.get(kind, f" {number}")
    file = f"INVARIANT = ''\nLINE = {told!r}\n\n\ndef main():\n    pass\n"
    assert check_answer(DEBUG, file, only=["names_the_line"]).passed
    assert not check_answer(DEBUG, file.replace(repr(told), repr(number + 1)), only=["names_the_line"]).passed


def test_a_missing_finding_of_a_debugging_exercise_is_reported_without_the_answer(check_answer):
    named = stubs.generate_solution(DEBUG).replace('LINE = "mean_over_ranks(parameter.data)"', "LINE = 3")
    named = named.replace('INVARIANT = "gradient"', 'INVARIANT = "start"')
    tests = [test.id for test in DEBUG.tests()]
    verdict = check_answer(DEBUG, named)
    failed = [result for result in verdict.results if result.finding]
    assert [result.id for result in failed] == ["names_the_invariant", "names_the_line"] == tests[-2:]
    told = "\n".join(line for result in failed for line in report.format_finding(result.finding))
    assert "gradient" not in told and DEBUG.fault not in told
    unmended = check_answer(DEBUG, stubs.generate_answer(DEBUG, "wrong_named_only"))
    assert {result.id for result in unmended.results if not result.finding} >= {"names_the_invariant", "names_the_line"}


def test_a_changed_scenario_does_not_change_what_is_measured(check_answer):
    """A prediction is checked against the course's scenarios; the learner's file is not run."""
    text = stubs.generate_solution(PREDICT).replace("if rank != 1:", "if True:")
    assert check_answer(PREDICT, text, only=["one_skips_the_sum"]).passed


def test_a_wrong_prediction_is_not_corrected(check_answer):
    for wrong in ("{0}", "{0, 1}", "set()"):
        text = f'ANSWERS = {{"one_skips_the_sum": {wrong}}}\n'
        finding = check_answer(PREDICT, text, only=["one_skips_the_sum"]).results[0].finding
        assert finding.kind == "wrong" and not finding.expected


def test_another_line_of_the_fault_may_be_blamed(check_answer):
    exercise = CATALOGUE["fast_pipeline"]
    stub, lines = stubs.generate_stub(exercise).splitlines(), stubs.faulty_lines(exercise)
    assert len(lines) == 2 and all(stub[number - 1].strip() == text for number, text in lines)
    for told in (each for line in lines for each in line):
        file = f"INVARIANT = ''\nLINE = {told!r}\n\n\ndef main():\n    pass\n"
        assert check_answer(exercise, file, only=["names_the_line"]).passed, told


def test_a_stub_that_cannot_be_made_is_reported():
    with pytest.raises(UserError, match="the stub has 0 lines 'mean_of_nothing', and must have one"):
        stubs.faulty_lines(dataclasses.replace(DEBUG, fault="mean_of_nothing"))
    change = dataclasses.replace(SCRIPT.changes[0], first="no such line")
    with pytest.raises(UserError, match="no lines from 'no such line' to .* in repaired_script.py"):
        stubs.generate_stub(dataclasses.replace(SCRIPT, changes=(change,)))
