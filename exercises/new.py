"""Write the files of a new exercise: its table in exercise.toml, its tests, its answers, and then stub and solution.

Each text that a person must write begins with `UNWRITTEN`, and the gate names those that are left.
"""

import ast
import json
import re
from pathlib import Path

from exercises import stubs
from exercises.catalogue import Catalogue, Exercise, module_file
from minidist.errors import UserError

UNWRITTEN = "To be written: "

_TABLE = '''
[{name}]
kind = "piece"
title = {title}
section = "{section}"
difficulty = 1
minutes = 10
points = 1
piece = "{piece}"
statement = """
{statement}
"""
calls = [{calls}]
guards = []
route = {route}
hints = [
    {question},
    {case},
]
why = {why}
blank = [
    {{ first = {first}, last = {last}, say = {say} }},
]
'''

_TESTS = '''"""Tests of {name}: {unwritten}the reference that the answers are compared with."""

from exercises.conditions import Declaration, Tensors, check_conditions
from exercises.testing import CONDITION_RANKS, test


def by_one_process(ranks, rank):
    """{unwritten}the result on one rank, from the arguments of all ranks."""
    return ranks[rank]["tensor"]


# {unwritten}the strategy of each argument (`Tensors`, `Choices` or `Drawn`) and the call; then what does not hold by
# default: what may change, how many roundings, whether ranks are replicas, which other dtypes may be sent.
DECLARATION = Declaration(
    inputs={{"tensor": Tensors()}},
    call=lambda answer, group, tensor: answer.{symbol}(tensor, group),
    reference=by_one_process,
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """{unwritten}what this test asks, in one line for the learner."""
    check_conditions(DECLARATION, answer, world, network)
'''

_ANSWERS = """# Right and wrong answers to `{name}`: exercises/answers.py describes the format.

[wrong.cheat]
caught_by = "holds_under_every_condition"
note = "the package's own"

[wrong.constant]
caught_by = "holds_under_every_condition"
note = "the same number, whatever is asked"

[wrong.zero]
caught_by = "holds_under_every_condition"
note = "zeros"
"""


def create_exercise(catalogue: Catalogue, name: str, chapter: str, piece: str) -> list[Path]:
    """Write all files of an exercise about a symbol of the package; return them.

    chapter: the folder of exercises, as "ch03_communication". piece: `module:symbol`; the learner writes the body
    of the function, or of the longest method of the class whose first and last line occur once. Raises UserError when
    the exercise exists already or its stub cannot be generated; then no file is left behind.
    """
    folder = catalogue.root / "exercises" / chapter
    if not name.isidentifier():
        raise UserError(f"the name of an exercise is that of its files, as in ring_all_reduce, not {name!r}")
    if name in list(catalogue):
        raise UserError(f"there is an exercise {name} already, in {catalogue[name].chapter}")
    if not (folder / "exercise.toml").is_file():
        raise UserError(f"{chapter} has no exercise.toml; chapters are {', '.join(_list_chapters(catalogue.root))}")
    first, last = _find_body(piece)
    written = {
        "title": f"{UNWRITTEN}the title, a few words",
        "route": f"none: {UNWRITTEN}why no layout of the simple trainer calls the piece; without this line if one does",
        "calls": f"{UNWRITTEN}the functions that the missing lines may call, with signatures, one a line",
        "question": f"{UNWRITTEN}a question that leads to the idea",
        "case": f"{UNWRITTEN}a small case, worked",
        "why": f"{UNWRITTEN}why the solution is as it is",
        "say": f"{UNWRITTEN}what the missing lines do",
    }
    texts = {key: json.dumps(text) for key, text in {**written, "first": first, "last": last}.items()}
    statement = f"{UNWRITTEN}what to build, arguments and results, an example with numbers, what is checked"
    section = _next_section(catalogue, chapter)
    table = _TABLE.format(name=name, piece=piece, section=section, statement=statement, **texts)
    new = {
        folder / f"test_{name}.py": _TESTS.format(name=name, unwritten=UNWRITTEN, symbol=piece.split(":")[1]),
        folder / "answers" / f"{name}.toml": _ANSWERS.format(name=name),
    }
    tables = folder / "exercise.toml"
    before = tables.read_text()
    tables.write_text(before.rstrip("\n") + "\n" + table)
    for file, text in new.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    try:
        return [tables, *new, *stubs.write_generated_files(Catalogue(catalogue.root)[name])]
    except UserError:
        tables.write_text(before)
        for file in new:
            file.unlink()
        raise


def find_placeholders(exercise: Exercise) -> list[str]:
    """List the placeholders of `create_exercise` that are still unwritten."""
    texts = {"title": exercise.title, "route": exercise.route, "statement": exercise.statement, "why": exercise.why}
    texts |= {f"call {number}": call for number, call in enumerate(exercise.calls, start=1)}
    texts |= {f"hint {number}": hint for number, hint in enumerate(exercise.hints, start=1)}
    texts |= {f"blank {number}": change.put for number, change in enumerate(exercise.changes, start=1)}
    texts |= {exercise.test_file.name: exercise.test_file.read_text()}
    left = [f"{key} is still to be written" for key, text in texts.items() if UNWRITTEN in text]
    course_map = exercise.root / "chapters" / "README.md"
    if course_map.is_file() and not _is_on_course_map(exercise, course_map.read_text()):
        left.append(f"chapters/README.md does not name it in a row of chapter {exercise.chapter[2:4]}")
    return left


def _is_on_course_map(exercise: Exercise, course_map: str) -> bool:
    """Return whether a row of the course map, `| idea | chapter | package | exercise | test |`, names the exercise."""
    lines = [line.split("|") for line in course_map.splitlines() if line.count("|") == 6]
    return any(exercise.chapter[2:4] in line[2] and f"`{exercise.name}`" in line[4] for line in lines)


def _list_chapters(root: Path) -> list[str]:
    """Return the names of the chapters' folders that have exercises."""
    return sorted(file.parent.name for file in (root / "exercises").glob("ch*/exercise.toml"))


def _next_section(catalogue: Catalogue, chapter: str) -> str:
    """Return the section after the chapter's last, such as 3.11."""
    sections = [exercise.section for exercise in catalogue.values() if exercise.chapter == chapter]
    numbers = [int(found[1]) for section in sections if (found := re.fullmatch(r"\d+\.(\d+)\w*", section))]
    return f"{int(chapter[2:4])}.{max(numbers, default=0) + 1}"


def _find_body(piece: str) -> tuple[str, str]:
    """Return the first and last line that the learner writes, without indentation."""
    module, _, symbol = piece.partition(":")
    if not symbol or not module_file(module).is_file():
        raise UserError(f"a piece is module:symbol, as in minidist.data.partition:block_partition, not {piece!r}")
    lines = module_file(module).read_text()
    nodes = {node.name: node for node in ast.parse(lines).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if symbol not in nodes:
        raise UserError(f"{module} has no function or class {symbol}")
    lines = lines.splitlines()
    node = nodes[symbol]
    source = [line.strip() for line in lines[node.lineno - 1 : node.end_lineno]]
    functions = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    for function in sorted(functions, key=lambda each: each.lineno - each.end_lineno):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        ends = [lines[body[0].lineno - 1].strip(), lines[body[-1].end_lineno - 1].strip()] if body else []
        if ends and all(sum(line.startswith(end) for line in source) == 1 for end in ends):
            return ends[0], ends[1]
    raise UserError(f"{piece} has no function whose body begins and ends with a line that occurs once")
