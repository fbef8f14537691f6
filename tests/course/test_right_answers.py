"""Right answers that look suspicious to a guard, or differ from the solution in a way that no statement forbids."""

import dataclasses
import textwrap

import pytest

from exercises import report, stubs
from exercises.catalogue import Catalogue
from exercises.check import check, modules_to_preload
from minidist.tools.launch import RankServer

CATALOGUE = Catalogue()

LINES_IN_A_FUNCTION = {
    "torch reads source lines": "import torch\nwith torch.random.fork_rng():\n    torch.manual_seed(0)",
    "logging with the stack": "import logging\nlogging.warning('here', stack_info=True)",
    "a warning about the caller": "import warnings\nwarnings.warn('odd', stacklevel=3)",
    "an error of another file logged": "import logging\ntry:\n    sorted([1, 'a'])\nexcept TypeError:\n"
    "    logging.exception('no order')",
    "pickle": "import pickle\npickle.loads(pickle.dumps([1]))",
    "torch.save to memory": "import io, torch\ntorch.save({}, io.BytesIO())",
    "output to nowhere": "import contextlib, os\nwith open(os.devnull, 'w') as f, contextlib.redirect_stdout(f):\n"
    "    print(1)",
    "a key named modules": "sizes = {'modules': 1}['modules']",
    "an attribute named modules": "from types import SimpleNamespace\nSimpleNamespace(modules=[]).modules",
    "variables named like modules": "concurrent, inspect, compile = 1, 2, 3\nconcurrent + inspect + compile",
    "the garbage collector": "import gc\ngc.collect()",
    "a thread": "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()",
    "a long silence": "import time\nif (n, world_size, rank) == (13, 3, 1): time.sleep(5.5)",
    "prints for a long time": "import time\nfor i in range(24 if (n, world_size, rank) == (13, 3, 1) else 0):\n"
    "    print(i)\n    time.sleep(0.25)",
}


def must_pass(server, exercise, text, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(text)
    verdict = check(exercise, file, server)
    assert verdict.passed, report.format_verdict(verdict)


@pytest.mark.parametrize("lines", LINES_IN_A_FUNCTION)
def test_harmless_lines_are_allowed(server, tmp_path, lines):
    exercise = CATALOGUE["block_partition"]
    put = textwrap.indent(LINES_IN_A_FUNCTION[lines], "    ") + "\n"
    text = stubs.solution_code(exercise).replace("    _check(n", put + "    _check(n")
    must_pass(server, exercise, text, tmp_path)


def test_libraries_may_be_imported_by_an_answer(tmp_path):
    """The import of torch._dynamo, which torch.compiler.disable needs, opens files for writing."""
    exercise = CATALOGUE["block_partition"]
    text = stubs.solution_code(exercise).replace("def block", "@torch.compiler.disable\ndef block")
    with RankServer(preload=modules_to_preload([exercise])) as server:
        must_pass(server, exercise, "import torch\n" + text, tmp_path)


@pytest.mark.exhaustive
def test_torch_may_set_its_own_environment_variables(tmp_path):
    """On a server that has not imported torch's compiler, as in a single check."""
    exercise = CATALOGUE["zero_stage_one"]
    with RankServer(preload=modules_to_preload([dataclasses.replace(exercise, imports=())])) as server:
        must_pass(server, exercise, stubs.solution_code(exercise), tmp_path)


SENDS_A_LIST = """\
    state = [model.state_dict()]
    dist.broadcast_object_list(state, 0)
    model.load_state_dict(state[0])
"""
SENDS_PARAMETERS = """\
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
"""
CALLABLE = """\
class Program:
    def __init__(self, run):
        self.run = run

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


main = Program(main)


"""
USED_FIRST = """\
        counts = torch.tensor(list(self.num_added.values()))
        all_reduce(counts, self.group)
        for total, count in zip(self.sums.values(), counts.tolist()):
            if count:
                all_reduce(total, self.group)"""
ONE_DIRECTION = """\
    chunks = list(tensor.view(-1).tensor_split(group.size))  # lengths differ by at most one, and may be 0
    ring_reduce_scatter(chunks, group, op)
    ring_all_gather(chunks, group)
"""
BOTH_DIRECTIONS = """\
    flat = tensor.view(-1)
    half = flat.numel() // 2
    size, rank = group.size, group.rank
    for part, way in ((flat[:half], 1), (flat[half:], -1)):
        chunks = list(part.tensor_split(size))[::way]
        for phase in range(2):
            for step in range(size - 1):
                out = (rank * way - step + phase) % size
                into = (out - 1) % size
                to, source = (rank + way) % size, (rank - way) % size
                exchange(group, (chunks[out], to), (chunks[into], source), None if phase else op)
"""
RUN = 'if __name__ == "__main__":\n'
FOUND = "    found = torch.autograd.grad(out, list(parameters.values()), grad, allow_unused=True)\n"
FOUND_OF_A_SUM = """\
    total = (out * grad).sum() if grad is not None else out
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
"""

# By name: the exercise, and (text of its solution, what stands there instead).
EDITS = {
    "pickled parameters": ("repaired_script", [(SENDS_PARAMETERS, SENDS_A_LIST)]),
    "a callable object": ("repaired_script", [(RUN, CALLABLE + RUN)]),
    "functools.partial": (
        "repaired_script",
        [("def main(", "def _main("), (RUN, "import functools\n\nmain = functools.partial(_main)\n" + RUN)],
    ),
    "a seed": (
        "ring_all_reduce",
        [
            (
                "    ring_reduce_scatter(chunks, group, op)\n",
                "    torch.Generator().manual_seed(0)\n    ring_reduce_scatter(chunks, group, op)\n",
            )
        ],
    ),
    "gradients of a sum": ("split_backward", [(FOUND, FOUND_OF_A_SUM)]),
    "nothing for unused parameters": (
        "data_parallel",
        [("        for total in self.sums.values():\n            all_reduce(total, self.group)", USED_FIRST)],
    ),
    "a ring in both directions": (
        "ring_all_reduce",
        [(ONE_DIRECTION, BOTH_DIRECTIONS)],
    ),
    "other rounding": (
        "bucket_overlap",
        [("backward_s * given / total_bytes", "backward_s * (given / total_bytes)")],
    ),
    "floats": ("stage_balance", [("_whole([embedding, *costs, head])", "[embedding, *costs, head]")]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EDITS)
def test_another_right_answer_passes(server, tmp_path, name):
    exercise, edits = CATALOGUE[EDITS[name][0]], EDITS[name][1]
    text = stubs.solution_code(exercise)
    for find, replace in edits:
        assert text.count(find) == 1, find
        text = text.replace(find, replace)
    must_pass(server, exercise, "import torch\n" + text, tmp_path)
