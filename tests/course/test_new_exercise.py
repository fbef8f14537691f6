"""How much the shared conditions check by themselves: a new exercise with a declaration, and no test of its own.

The exercise in `new_exercise/` is not in the course. Its statement, its solution and its right and wrong answers were
written before their author had read the conditions, and no answer was taken out afterwards.

Three wrong answers pass. `reshaped` fails for features without elements only, `nothing_is_flat` if no rank has rows and
there are features: an empty tensor is always a vector here. `counts_in_dtype` fails for more than 256 rows in bfloat16:
large tensors are always of the first dtype.
"""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from exercises import stubs
from exercises.__main__ import main
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.check import check
from exercises.new import UNWRITTEN, find_placeholders

HERE = Path(__file__).parent / "new_exercise"
CHAPTER, NAME = "ch03_communication", "uneven_gather"
LEAST_REFUSED = 0.8
# What the instructor writes in the test file: strategies and a reference. Each rank leaves out some rows of its tensor.
DECLARATION = '''\
def by_one_process(ranks, rank):
    """Return the rows of all ranks, from the arguments of all ranks."""
    return torch.cat([each["rows"][each["left_out"] :] for each in ranks])


LEFT_OUT = Drawn(
    lambda rank, ranks, draw: ((1 + 3 * rank) % 5, 99_999 * (rank == 0), 0)[draw],
    {"no rows on the first rank": 1, "as many rows on every rank": 2},
)
DECLARATION = Declaration(
    inputs={"rows": Tensors(layouts=("slice", "transposed")), "left_out": LEFT_OUT},
    call=lambda answer, group, rows, left_out: answer.gather_rows(rows[left_out:], group),
    reference=by_one_process,
    replicas=True,
    more_dtypes=(torch.int64,),  # of the numbers of rows
)


'''


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    """The exercise in a copy of a chapter, as its instructor leaves it: no answer but the solution, no test added."""
    root = tmp_path_factory.mktemp("course")
    for folder in ("exercises", "solutions"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder / CHAPTER, root / folder / CHAPTER, ignore=ignored)
    piece = f"tests.course.new_exercise.{NAME}:gather_rows"
    assert main(["--root", str(root), "new", NAME, "--chapter", CHAPTER, "--piece", piece]) == 0
    new = Catalogue(root)[NAME]
    tests = re.sub(r"def by_one_process.*?(?=@test)", lambda _: DECLARATION, new.test_file.read_text(), flags=re.DOTALL)
    tests = tests.replace("import Declaration, Tensors", "import Declaration, Drawn, Tensors")
    new.test_file.write_text(tests.replace("\nfrom exercises", "\nimport torch\n\nfrom exercises", 1))
    written = tomllib.loads((HERE / "texts.toml").read_text()).values()
    texts = iter([text for each in written for text in (each if isinstance(each, list) else [each])])
    for file in (new.folder / "exercise.toml", new.test_file):
        file.write_text(re.sub(f'{UNWRITTEN}[^"\n]*', lambda _: next(texts).strip(), file.read_text()))
    assert not list(texts)
    assert main(["--root", str(root), "generate"]) == 0
    new = Catalogue(root)[NAME]
    assert not find_placeholders(new) and not stubs.outdated_files(new)
    assert [test.id for test in new.tests()] == ["holds_under_every_condition"]
    return new


def check_answers(exercise, server, group, folder) -> dict[str, bool]:
    """Check the "right" or the "wrong" answers; return whether each passes."""
    answers = read_answers(exercise, HERE / "answers.toml")
    files = [stubs.write_answer(exercise, each.name, folder, answers) for each in getattr(answers, group)]
    return {file.stem: check(exercise, file, server, stop=True).passed for file in files}


def test_the_conditions_refuse_most_wrong_answers_and_pass_the_solution(exercise, server, tmp_path):
    assert check(exercise, exercise.solution, server).passed
    passes = check_answers(exercise, server, "wrong", tmp_path)
    survivors = [name for name, passed in passes.items() if passed]
    refused = len(passes) - len(survivors)
    told = f"refused: {refused} of {len(passes)} wrong answers; these pass: {', '.join(survivors)}"
    print(told)
    assert len(passes) >= 20 and refused >= LEAST_REFUSED * len(passes), told


@pytest.mark.exhaustive
def test_the_conditions_pass_every_right_answer(exercise, server, tmp_path):
    passes = check_answers(exercise, server, "right", tmp_path)
    assert len(passes) >= 4 and all(passes.values()), passes
