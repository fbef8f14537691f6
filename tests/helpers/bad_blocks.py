"""Bad answers to the exercise `block_partition`, each with the check's message about it."""

from exercises.catalogue import ROOT

FIRST_CASE = "  for       block_partition(n=1, world_size=1, rank=0)"
OPEN_NOTEBOOK = f"open({str(ROOT / 'chapters' / '01_data_distribution' / '01_data_distribution.ipynb')!r})"
HEAD = "import numpy as np\n\n\ndef block_partition(n, world_size, rank):\n"

# A body of `block_partition`, or a whole file; the message about it.
BAD_ANSWERS = {
    "syntax": (
        "def block_partition(n, world_size, rank)\n    return 1\n",
        ["your file has a syntax error: expected ':'", "  line      1: def block_partition(n, world_size, rank)"],
    ),
    "no function": ("x = 1\n", ["your file must define block_partition"]),
    "not a function": ("block_partition = 3\n", ["your file must define block_partition"]),
    "other arguments": (
        "def block_partition(n, world_size):\n    return 1\n",
        [
            "block_partition must accept these arguments, as in the stub: too many positional arguments",
            "  for       block_partition(1, 1, 0)",
        ],
    ),
    "nothing returned": (
        HEAD + "    pass\n",
        [
            "the function returned None: is a `return` missing?",
            FIRST_CASE,
            "  expected  a numpy array of int64",
            "  got       None",
        ],
    ),
    "a number returned": (
        HEAD + "    return n\n",
        [
            "the result has the wrong type",
            FIRST_CASE,
            "  expected  a one-dimensional numpy array of int64",
            "  got       int 1",
        ],
    ),
    "floats returned": (
        HEAD + "    return np.zeros(n)\n",
        [
            "the result has the wrong type",
            FIRST_CASE,
            "  expected  a one-dimensional numpy array of int64",
            "  got       float64 array of shape (1,)",
        ],
    ),
    "an error": (
        HEAD + "    return [1, 2][n + 7]\n",
        ["your code raised IndexError: list index out of range", FIRST_CASE, "  line      5: return [1, 2][n + 7]"],
    ),
    "an error on import": (
        "x = 1 / 0\n",
        ["your code raised ZeroDivisionError: division by zero", "  line      1: x = 1 / 0"],
    ),
    "an error that cannot say what it is": (
        "class Bad(Exception):\n    def __str__(self):\n        raise self\n\n\n"
        "def block_partition(*n):\n    raise Bad\n",
        ["your code raised Bad: no message", "  for       block_partition(n=[1, 1, 0])", "  line      7: raise Bad"],
    ),
    "a byte of nothing": (
        "x = 1\0\n",
        ["your file has a syntax error: source code string cannot contain null bytes"],
    ),
    "recursion": (
        HEAD + "    return block_partition(n, world_size, rank)\n",
        [
            "your code raised RecursionError: maximum recursion depth exceeded",
            FIRST_CASE,
            "  line      5: return block_partition(n, world_size, rank)",
        ],
    ),
    "an endless loop": (
        # On one line, which is the line reported wherever in the loop the process is stopped.
        HEAD + "    while True: pass\n",
        ["your code does not finish", FIRST_CASE, "  line      5: while True: pass"],
    ),
    "os._exit": (
        "import os\n\n\ndef block_partition(n, world_size, rank):\n    os._exit(0)\n",
        ["line 5 calls os._exit: an answer must not end its process", FIRST_CASE, "  line      5: os._exit(0)"],
    ),
    "sys.exit": (
        HEAD + "    raise SystemExit(0)\n",
        ["your code ends the program (sys.exit)", FIRST_CASE, "  line      5: raise SystemExit(0)"],
    ),
    "a segfault": (
        "import faulthandler\n\n\ndef block_partition(n, world_size, rank):\n    faulthandler._sigsegv()\n",
        ["your code ended its process: killed by SIGSEGV", FIRST_CASE, "  line      5: faulthandler._sigsegv()"],
    ),
    "memory without end": (
        HEAD + "    kept = []\n    while True:\n        kept.append(np.ones(1 << 20))\n",
        [
            "your code needs more memory than a check allows",
            FIRST_CASE,
            "  line      7: kept.append(np.ones(1 << 20))",
        ],
    ),
    "printing without end": (
        HEAD + '    while True: print("again and again")\n',
        ["your code prints endlessly", FIRST_CASE, '  line      5: while True: print("again and again")'],
    ),
    "a file written": (
        HEAD + '    open("out.txt", "w")\n',
        [
            "line 5 opens out.txt for writing: an answer must not write files",
            FIRST_CASE,
            '  line      5: open("out.txt", "w")',
        ],
    ),
    "a file removed": (
        "import os\n\n\ndef block_partition(n, world_size, rank):\n    os.remove('out.txt')\n",
        [
            "line 5 calls os.remove on out.txt: an answer must not change files",
            FIRST_CASE,
            "  line      5: os.remove('out.txt')",
        ],
    ),
    "the source read": (
        "from minidist.data import partition\n\n\n"
        "def block_partition(n, world_size, rank):\n    open(partition.__file__)\n",
        ["line 5 reads partition.py: write the answer yourself", FIRST_CASE, "  line      5: open(partition.__file__)"],
    ),
    "a process started": (
        "import os\n\n\ndef block_partition(n, world_size, rank):\n    os.system('true')\n",
        [
            "line 5 starts or ends a process (os.system): an answer must not start or end processes",
            FIRST_CASE,
            "  line      5: os.system('true')",
        ],
    ),
    "the package's own piece": (
        "from minidist.data.loader import block_partition as b\n\n\n"
        "def block_partition(n, world_size, rank):\n    return b(n, 1, 0)\n",
        [
            "line 5 calls minidist.data.partition.block_partition: this is the code that you write here",
            FIRST_CASE,
            "  line      5: return b(n, 1, 0)",
        ],
    ),
    "a ready-made equivalent": (
        HEAD + "    return np.array_split(np.arange(n), world_size)[rank]\n",
        [
            "line 5 calls numpy.array_split: this exercise must be solved without it",
            FIRST_CASE,
            "  line      5: return np.array_split(np.arange(n), world_size)[rank]",
        ],
    ),
    "the package's own piece as it is": (
        "from minidist.data.partition import block_partition\n",
        [
            "your code uses minidist.data.partition.block_partition: this is the code that you write here",
            "  for       block_partition(args=[1, 1, 0])",
        ],
    ),
    "a ready-made equivalent from below its guard": (
        HEAD + "    return np.array_split.__wrapped__(np.arange(n), world_size)[rank]\n",
        [
            "your code raised AttributeError: 'function' object has no attribute '__wrapped__'",
            FIRST_CASE,
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
            "line 3 opens the folder /: an answer must not open folders",
            "  line      3: os.open('/', os.O_RDONLY)",
        ],
    ),
    "a part of the check": (
        HEAD + "    import sys\n    sys.modules['exercise_tests'].expect = print\n",
        [
            "line 6 uses modules: an answer must not use the internals of Python or of the grader",
            "  line      6: sys.modules['exercise_tests'].expect = print",
        ],
    ),
    "a wrong value": (
        HEAD + "    return np.arange(rank * n // world_size, (rank + 1) * n // world_size - (rank > 1))\n",
        [
            "a block of equal size",
            "  for       block_partition(n=3, world_size=3, rank=2)",
            "  expected  [2]",
            "  got       []",
        ],
    ),
}
