"""Names that an answer's source may and may not use."""

import pytest

from exercises import check, stubs
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.source_check import find_forbidden_code

FORBIDDEN = {
    "import importlib": "importlib",
    "import torch.multiprocessing": "multiprocessing",
    "from torch import multiprocessing": "multiprocessing",
    "import exercise_tests": "exercise_tests",
    "from exercises.testing import expect": "exercises",
    "from exercises import testing": "exercises",
    "import sys as s; s.modules": "modules",
    "from sys import modules": "modules",
    "from sys import _getframe as f": "_getframe",
    "f = torch.sys.modules": "modules",
    "getattr(sys, 'modules')": "modules",
    "operator.attrgetter('f_back.f_locals')": "f_back",
    "error.__traceback__.tb_frame": "tb_frame",
    "numpy.ctypeslib.ctypes": "ctypes",
    "__builtins__['print']": "__builtins__",
    "print(eval('1'))": "eval",
    "run = exec": "exec",
    "__import__('gc')": "__import__",
    "def f(): return p.__guarded__": "__guarded__",
    "block_partition.__closure__[0]": "__closure__",
    "block_partition.__code__ = other": "__code__",
}
ALLOWED = """
import contextlib, functools, itertools, math, os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from minidist.comm import all_reduce
model = torch.compile(torch.nn.Linear(1, 1)).eval()
for layer in model.modules(): layer.train(False)
rank = int(os.environ["RANK"]), sys.argv, re.compile("a"), "the modules of a network"
concurrent, sizes, self.modules, compile = 1, {"modules": 2}, [], None
compile, gc.collect(), getattr(model, "modules")()
if __name__ == "__main__": main()
"""


@pytest.mark.parametrize("text", FORBIDDEN)
def test_access_to_internals_is_reported_with_its_line(text):
    line, told = find_forbidden_code(f"x = 1\n{text}\n".encode())
    assert line == 2 and told.startswith(f"line 2 uses {FORBIDDEN[text]}: ")


def test_ordinary_answers_are_allowed():
    assert find_forbidden_code(ALLOWED.encode()) is None


def test_every_right_answer_and_every_solution_is_allowed():
    files = [*ROOT.glob("solutions/*/*.py")]
    files += [file for file in ROOT.glob("exercises/ch*/*.py") if not file.name.startswith("test_")]
    texts = {str(file): file.read_text() for file in files}
    for exercise in Catalogue().values():
        for answer in read_answers(exercise).right:
            texts[f"{exercise.name} {answer.name}"] = stubs.generate_answer(exercise, answer.name)
    assert len(texts) > 30 and not [name for name, text in texts.items() if find_forbidden_code(text.encode())]


@pytest.mark.parametrize("source", [b"def f(:\n", b"x = 1\0\n", b"(" * 5000, b"\xff\xfe"])
def test_syntax_errors_are_left_to_the_check(source):
    assert find_forbidden_code(source) is None


@pytest.mark.parametrize("name", ["elsewhere", "thread", "alias", "notebook", "other_path"])
def test_the_guard_sees_them_without_reading(server, tmp_path, monkeypatch, name):
    """Access that the source does not show is refused at run time."""
    exercise = Catalogue()["block_partition"]
    monkeypatch.setattr(check, "find_forbidden_code", lambda source: None)
    file = stubs.write_answer(exercise, f"wrong_cheat_{name}", tmp_path)
    [result] = check.check(exercise, file, server, only=["divides_evenly"]).results
    assert result.finding.kind == "forbidden"


@pytest.mark.parametrize("name", ["guard_off", "guard_emptied"])
def test_the_guard_is_not_to_be_found(server, tmp_path, monkeypatch, name):
    exercise = Catalogue()["block_partition"]
    monkeypatch.setattr(check, "find_forbidden_code", lambda source: None)
    verdict = check.check(exercise, stubs.write_answer(exercise, f"wrong_cheat_{name}", tmp_path), server)
    assert verdict.points == 0
