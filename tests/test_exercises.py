"""Judging a learner's file: right, wrong, and every way to be neither. What is said is compared word by word."""

import json
from pathlib import Path

import pytest

from exercises import report, stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.check import check
from exercises.testing import Finding, Wrong, expect

CATALOGUE = Catalogue()
BLOCK, RANDOM, GRADIENTS = CATALOGUE["block_partition"], CATALOGUE["random_partition"], CATALOGUE["gradient_sum"]
FIRST = "  for       block(n=1, world_size=1, rank=0)"
HEAD = "import numpy as np\n\n\ndef block(n, world_size, rank):\n"

# A body of `block`, or a whole file; the message about it.
BAD = {
    "syntax": (
        "def block(n, world_size, rank)\n    return 1\n",
        ["Python cannot read your file: expected ':'", "  line      1: def block(n, world_size, rank)"],
    ),
    "no function": ("x = 1\n", ["your file defines no block, which this exercise asks for"]),
    "not a function": ("block = 3\n", ["your file defines no block, which this exercise asks for"]),
    "other arguments": (
        "def block(n, world_size):\n    return 1\n",
        [
            "block must be callable like this, as in the stub: too many positional arguments",
            "  for       block(1, 1, 0)",
        ],
    ),
    "nothing returned": (
        HEAD + "    pass\n",
        [
            "nothing came back: is there a `return`?",
            FIRST,
            "  expected  a numpy array of int64",
            "  got       None",
        ],
    ),
    "a number returned": (
        HEAD + "    return n\n",
        [
            "the result has the wrong type",
            FIRST,
            "  expected  a one-dimensional numpy array of int64",
            "  got       int 1",
        ],
    ),
    "floats returned": (
        HEAD + "    return np.zeros(n)\n",
        [
            "the result has the wrong type",
            FIRST,
            "  expected  a one-dimensional numpy array of int64",
            "  got       float64 array of shape (1,)",
        ],
    ),
    "an error": (
        HEAD + "    return [1, 2][n + 7]\n",
        ["your code raised IndexError: list index out of range", FIRST, "  line      5: return [1, 2][n + 7]"],
    ),
    "an error on import": (
        "x = 1 / 0\n",
        ["your code raised ZeroDivisionError: division by zero", "  line      1: x = 1 / 0"],
    ),
    "an error that cannot say what it is": (
        "class Bad(Exception):\n    def __str__(self):\n        raise self\n\n\ndef block(*n):\n    raise Bad\n",
        ["your code raised Bad: no message", "  for       block(n=[1, 1, 0])", "  line      7: raise Bad"],
    ),
    "a byte of nothing": (
        "x = 1\0\n",
        ["Python cannot read your file: source code string cannot contain null bytes"],
    ),
    "recursion": (
        HEAD + "    return block(n, world_size, rank)\n",
        [
            "your code raised RecursionError: maximum recursion depth exceeded",
            FIRST,
            "  line      5: return block(n, world_size, rank)",
        ],
    ),
    "an endless loop": (
        HEAD + "    while True:\n        pass\n",
        ["your code does not come to an end", FIRST, "  line      5: while True:"],
    ),
    "os._exit": (
        "import os\n\n\ndef block(n, world_size, rank):\n    os._exit(0)\n",
        ["line 5 calls os._exit: an answer must not end its process", FIRST, "  line      5: os._exit(0)"],
    ),
    "sys.exit": (
        HEAD + "    raise SystemExit(0)\n",
        ["your code ends the program (sys.exit)", FIRST, "  line      5: raise SystemExit(0)"],
    ),
    "a segfault": (
        "import ctypes\n\n\ndef block(n, world_size, rank):\n    ctypes.string_at(0)\n",
        ["your code ended its process: killed by SIGSEGV", FIRST, "  line      5: ctypes.string_at(0)"],
    ),
    "memory without end": (
        HEAD + "    kept = []\n    while True:\n        kept.append(np.ones(1 << 20))\n",
        [
            "your code asks for more memory than a check may use",
            FIRST,
            "  line      7: kept.append(np.ones(1 << 20))",
        ],
    ),
    "printing without end": (
        HEAD + '    while True: print("again and again")\n',
        ["your code prints without end", FIRST, '  line      5: while True: print("again and again")'],
    ),
    "a file written": (
        HEAD + '    open("out.txt", "w")\n',
        ["line 5 opens out.txt for writing: an answer writes no files", FIRST, '  line      5: open("out.txt", "w")'],
    ),
    "a file removed": (
        "import os\n\n\ndef block(n, world_size, rank):\n    os.remove('out.txt')\n",
        [
            "line 5 calls os.remove on out.txt: an answer touches no files",
            FIRST,
            "  line      5: os.remove('out.txt')",
        ],
    ),
    "the source read": (
        "from minidist.data import partition\n\n\ndef block(n, world_size, rank):\n    open(partition.__file__)\n",
        ["line 5 reads partition.py: write the answer yourself", FIRST, "  line      5: open(partition.__file__)"],
    ),
    "a process started": (
        "import os\n\n\ndef block(n, world_size, rank):\n    os.system('true')\n",
        [
            "line 5 starts or ends a process (os.system): an answer has no business with processes",
            FIRST,
            "  line      5: os.system('true')",
        ],
    ),
    "the package's own piece": (
        "from minidist.data.loader import block as b\n\n\ndef block(n, world_size, rank):\n    return b(n, 1, 0)\n",
        [
            "line 5 calls minidist.data.partition.block: that is what you are to write",
            FIRST,
            "  line      5: return b(n, 1, 0)",
        ],
    ),
    "a ready-made equivalent": (
        HEAD + "    return np.array_split(np.arange(n), world_size)[rank]\n",
        [
            "line 5 calls numpy.array_split: the exercise is to do without it",
            FIRST,
            "  line      5: return np.array_split(np.arange(n), world_size)[rank]",
        ],
    ),
    "a wrong value": (
        HEAD + "    return np.arange(rank * n // world_size, (rank + 1) * n // world_size - (rank > 1))\n",
        [
            "a block of equal size",
            "  for       block(n=3, world_size=3, rank=2)",
            "  expected  [2]",
            "  got       []",
        ],
    ),
}


@pytest.fixture
def judge(server, tmp_path):
    """`judge(exercise, text)`: the verdict on a file with that text."""

    def run(exercise, text, **options):
        file = tmp_path / f"{exercise.name}.py"
        file.write_text(text)
        return check(exercise, file, server, **options)

    return run


def answer(exercise, name) -> str:
    return (exercise.answers / f"{name}.py").read_text()


@pytest.mark.parametrize("name", BAD)
def test_what_is_said_about_a_bad_answer(judge, name):
    text, expected = BAD[name]
    verdict = judge(BLOCK, text, only=["divides_evenly"])
    assert report.message(verdict.results[0].finding) == expected
    assert verdict.points == 0 and not verdict.passed


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_solution_has_all_points(server, name):
    verdict = check(CATALOGUE[name], CATALOGUE[name].solution, server)
    assert verdict.passed and verdict.points == CATALOGUE[name].points


def test_an_answer_that_hangs_is_not_asked_again_and_what_passed_before_counts(judge):
    text = HEAD + (
        "    size, longer = divmod(n, world_size)\n"
        "    while longer: pass\n"
        "    return np.arange(rank * size, rank * size + size)\n"
    )
    verdict = judge(BLOCK, text)
    kinds = [result.finding and result.finding.kind for result in verdict.results]
    assert kinds == [None, "hang", "skipped", "skipped", "skipped"]
    assert verdict.points == 2


def test_a_deadlock_is_told_with_who_waits_where(judge):
    text = answer(GRADIENTS, "wrong_mean").replace("import all_reduce", "import all_reduce, recv")
    text = text.replace("all_reduce(total, group)", "recv(total, 1 - group.rank, group)")
    verdict = judge(GRADIENTS, text, only=["parameters_stay"])
    finding = verdict.results[0].finding
    line = 1 + next(number for number, told in enumerate(text.splitlines()) if "recv(total" in told)
    assert (finding.kind, finding.test) == ("deadlock", "parameters_stay")
    assert finding.what.startswith("deadlock: ranks 0-1 wait for something that can never happen")
    for rank in (0, 1):
        assert f"rank {rank}: waiting in recv from rank {1 - rank} #1" in finding.what
    assert finding.what.count(f"gradient_sum.py:{line}") == 2
    assert len(report.text(verdict, 3).splitlines()) <= report.MAX_LINES


def test_the_rank_that_loops_is_told_from_those_that_wait_for_it(judge):
    text = answer(GRADIENTS, "wrong_mean")
    text = text.replace("all_reduce(total, group)", "while group.rank == 1: pass\n            all_reduce(total, group)")
    finding = judge(GRADIENTS, text, only=["parameters_stay"]).results[0].finding
    assert (finding.kind, finding.rank, finding.size) == ("hang", 1, 2)
    assert finding.source == "while group.rank == 1: pass"
    assert "rank 0: waiting in all_reduce" in finding.what and "rank 1: running" in finding.what


def test_the_rank_that_dies_is_told_and_not_the_broken_connection(judge):
    text = answer(GRADIENTS, "wrong_mean").replace(
        "all_reduce(total, group)",
        "if group.rank == 1: import ctypes; ctypes.string_at(0)\n            all_reduce(total, group)",
    )
    finding = judge(GRADIENTS, text, only=["parameters_stay"]).results[0].finding
    assert (finding.kind, finding.rank) == ("died", 1)
    assert finding.what == "your code ended its process: killed by SIGSEGV"


def test_ranks_that_call_different_things_are_told(judge):
    text = answer(GRADIENTS, "wrong_mean").replace(
        "total = self", "total = torch.ones(group.rank + 1) if group.rank else self"
    )
    verdict = judge(GRADIENTS, text, only=["parameters_stay"])
    assert verdict.results[0].finding.kind in ("deadlock", "network", "died", "raised")
    assert len(report.text(verdict, 3).splitlines()) <= report.MAX_LINES


def test_the_rank_is_named_on_which_it_is_wrong(judge):
    verdict = judge(GRADIENTS, answer(GRADIENTS, "wrong_last_rank_keeps_its_own"), only=["sums_over_ranks"])
    assert (verdict.results[0].finding.rank, verdict.results[0].finding.size) == (2, 3)
    assert report.message(verdict.results[0].finding) == [
        "the gradient of weight, at [0]",
        "  rank      2 of 3",
        "  expected  [48.0, 51.0, 54.0]",
        "  got       [26.0, 27.0, 28.0]",
    ]


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
def test_what_is_expected_is_compared_and_the_first_difference_shown(got, expected, told):
    if told is None:
        return expect("sum", got, expected)
    with pytest.raises(Wrong) as wrong:
        expect("sum", got, expected)
    assert (str(wrong.value), wrong.value.expected, wrong.value.got) == told


def test_a_class_of_the_package_may_not_be_inherited(judge):
    verdict = judge(GRADIENTS, answer(GRADIENTS, "wrong_cheat"), only=["sums_over_ranks"])
    told = "your code uses minidist.parallel.grads.NaiveSink: that is what you are to write"
    assert report.message(verdict.results[0].finding) == [told]


def test_except_does_not_hide_what_was_tried(judge):
    text = "from minidist.data import partition\n\n\ndef block(*args):\n    try:\n        partition.block(*args)\n"
    verdict = judge(BLOCK, text + "    except BaseException:\n        return None\n", only=["divides_evenly"])
    assert verdict.results[0].finding.kind == "forbidden"


def test_what_is_skipped_printed_or_left_in_the_folder_stays_there(judge, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    judge(BLOCK, 'print("hello")\n' + answer(BLOCK, "right_loop"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "block_partition.py"])


def test_the_last_printed_line_is_shown(judge):
    verdict = judge(BLOCK, HEAD + '    print("rank", rank)\n    return np.arange(n)\n', only=["divides_evenly"])
    assert report.message(verdict.results[0].finding) == [
        "a block of equal size",
        "  for       block(n=2, world_size=2, rank=0)",
        "  expected  [0]",
        "  got       [0, 1]",
        "  printed   rank 0",
    ]


def test_a_long_explanation_is_cut_and_the_facts_stay():
    finding = Finding("deadlock", "\n".join("abcdefghijklmnopqrst"), call="f(1)", line=3, source="x")
    told = report.message(finding, 6)
    assert told == ["a", "b", "c", "...", "  for       f(1)", "  line      3: x"]


def test_the_verdict_for_programs_is_stable(judge):
    text = answer(BLOCK, "wrong_ceiling")
    first, second = (json.dumps(report.as_json(judge(BLOCK, text))) for _ in range(2))
    assert first == second
    told = json.loads(first)
    assert told.keys() == {"exercise", "kind", "passed", "points", "of", "tests"}
    assert [test["id"] for test in told["tests"]] == [test.id for test in BLOCK.tests()]
    assert sum(test["points"] for test in told["tests"]) == told["points"] < told["of"] == BLOCK.points
    assert all(bool(test["message"]) == (test["points"] == 0) for test in told["tests"])


def test_the_report_of_a_wrong_answer(judge):
    verdict = judge(BLOCK, answer(BLOCK, "wrong_rest_to_last"))
    assert report.text(verdict, 3) == "\n".join(
        [
            "block_partition: 5 of 10 points",
            "passed: divides_evenly, each_index_once",
            "failed: sizes_differ_by_at_most_one, more_ranks_than_samples, refuses_impossible_input",
            "",
            "sizes_differ_by_at_most_one: No rank has two samples more than another, and the longer blocks come first.",
            "the sizes of the blocks",
            "  for       n=1, world_size=2",
            "  expected  [1, 0]",
            "  got       [0, 1]",
            "Next hint: python -m exercises hint block_partition (3 left)",
        ]
    )


def test_a_stub_of_an_older_version_is_told(judge):
    old = stubs.stub(BLOCK).replace(stubs.version(stubs.stub(BLOCK)), "00000000")
    assert "Your file began as an older stub" in report.text(judge(BLOCK, old))
    assert "older" not in report.text(judge(BLOCK, stubs.stub(BLOCK)))


def test_stubs_and_solutions_are_what_the_package_generates():
    assert len(CATALOGUE) >= 5
    for exercise in CATALOGUE.values():
        assert not stubs.drift(exercise)
        compile(stubs.empty(exercise), exercise.name, "exec")


def test_nothing_here_names_the_learners_folder():
    assert not [path for path in Path(ROOT, "exercises").rglob("*.py") if "/" + "work/" in path.read_text()]
