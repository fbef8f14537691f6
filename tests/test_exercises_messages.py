"""What a learner is told about a file of a piece, word by word: right, wrong, and every way to be neither."""

import json

import pytest

from exercises import report, stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.testing import Finding, Wrong, expect

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
FIRST = "  for       block(n=1, world_size=1, rank=0)"
OPEN_NOTEBOOK = f"open({str(ROOT / 'chapters' / '01_data_distribution' / '01_data_distribution.ipynb')!r})"
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
        "import faulthandler\n\n\ndef block(n, world_size, rank):\n    faulthandler._sigsegv()\n",
        ["your code ended its process: killed by SIGSEGV", FIRST, "  line      5: faulthandler._sigsegv()"],
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
    "the package's own piece as it is": (
        "from minidist.data.partition import block\n",
        [
            "your code uses minidist.data.partition.block: that is what you are to write",
            "  for       block(args=[1, 1, 0])",
        ],
    ),
    "a ready-made equivalent from below its guard": (
        HEAD + "    return np.array_split.__wrapped__(np.arange(n), world_size)[rank]\n",
        [
            "your code raised AttributeError: 'function' object has no attribute '__wrapped__'",
            FIRST,
            "  line      5: return np.array_split.__wrapped__(np.arange(n), world_size)[rank]",
        ],
    ),
    "the source read by another way": (
        "from minidist.data.partition import __file__ as f\n\nopen('/proc/self/root' + f)\n",
        ["line 3 reads partition.py: write the answer yourself", "  line      3: open('/proc/self/root' + f)"],
    ),
    "a notebook of the course read": (
        OPEN_NOTEBOOK + "\n",
        [
            "line 1 reads 01_data_distribution.ipynb: write the answer yourself",
            f"  line      1: {OPEN_NOTEBOOK[:100]}",
        ],
    ),
    "a file beside the source": (
        "from minidist.data.partition import __file__ as f\n\nopen(f + 'i')\n",
        [
            "your code raised FileNotFoundError: [Errno 2] No such file or directory: "
            f"'{ROOT / 'minidist' / 'data' / 'partition.pyi'}'",
            "  line      3: open(f + 'i')",
        ],
    ),
    "a folder opened": (
        "import os\n\nos.open('/', os.O_RDONLY)\n",
        [
            "line 3 opens the folder /: an answer has no business with folders",
            "  line      3: os.open('/', os.O_RDONLY)",
        ],
    ),
    "a part of the check": (
        HEAD + "    import sys\n    sys.modules['exercise_tests'].expect = print\n",
        [
            "line 6 uses modules: an answer has no business with the insides of Python or of the check",
            "  line      6: sys.modules['exercise_tests'].expect = print",
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


def answer(exercise, name) -> str:
    return (exercise.answers / f"{name}.py").read_text()


@pytest.mark.parametrize("name", BAD)
def test_what_is_said_about_a_bad_answer(judge, name):
    text, expected = BAD[name]
    verdict = judge(BLOCK, text, only=["divides_evenly"])
    assert report.message(verdict.results[0].finding) == expected
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
def test_what_is_expected_is_compared_and_the_first_difference_shown(got, expected, told):
    if told is None:
        return expect("sum", got, expected)
    with pytest.raises(Wrong) as wrong:
        expect("sum", got, expected)
    assert (str(wrong.value), wrong.value.expected, wrong.value.got) == told


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


# How any file can be no program, and what the report says of it whatever the exercise is.
NO_PROGRAM = {
    "def main(:\n": "Python cannot read your file: invalid syntax",
    "import sys\nsys.exit(3)\n": "your code ends the program (sys.exit)",
    "x = 1\n": "your file defines no ",
}


@pytest.mark.parametrize("text", NO_PROGRAM)
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_file_that_is_no_program_is_told_as_that(judge, name, text):
    exercise = CATALOGUE[name]
    measured = {test.id: [] for test in exercise.tests()}
    told = report.text(judge(exercise, text, measured=measured), 3).splitlines()
    assert len(told) <= report.MAX_LINES and any(line.startswith(NO_PROGRAM[text]) for line in told)
