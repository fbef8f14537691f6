"""Stubs and solutions, generated from the one source of each exercise.

The source of a piece is the package's own source: the imports it needs, then its symbols. The
other kinds have a program in the chapter's folder `programs/`, whose docstring states the task. A solution is the
source with a note on its reasons and on usual mistakes. A stub is the source with the lines replaced that exercise.toml
declares: by `raise NotImplementedError` in a piece, by faults in a program.
"""

import ast
import hashlib
import re
import textwrap
from pathlib import Path

from exercises import generated_answers
from exercises.answers import Answer, Answers, answer_text, apply_edits, read_answers
from exercises.catalogue import Change, Exercise, module_file
from minidist.errors import UserError

_WIDTH = 118
_LINE = 120
_STUB = re.compile(r"^Stub ([0-9a-f]{8})\.$", re.MULTILINE)


def generate_stub(exercise: Exercise) -> str:
    """Generate the text of the learner's file."""
    body = _join_parts(exercise, _apply_changes(exercise))
    docstring = [
        f"{exercise.title}.",
        "",
        *_task_lines(exercise),
        f"Check it with: python -m exercises check {exercise.name}",
        "",
        f"Stub {hashlib.sha256(body.encode()).hexdigest()[:8]}.",
    ]
    return _format_docstring(docstring) + "\n\n" + body + "\n"


def generate_empty_answer(exercise: Exercise) -> str:
    """Generate an empty answer: functions that do nothing and empty constants."""
    if exercise.kind == "piece":
        return re.sub(r"raise NotImplementedError\(.*\)", "pass", generate_stub(exercise))
    functions = [f"def {name}(*args, **kwargs):\n    pass\n" for name in exercise.symbols if not name.isupper()]
    return "\n\n".join([*functions, *(f"{name} = {{}}\n" for name in exercise.symbols if name.isupper())])


def faulty_lines(exercise: Exercise) -> list[tuple[int, str]]:
    """Return number and text of the lines of a debugging exercise that may be blamed, that of the fault first.

    Raises UserError unless each occurs exactly once.
    """
    return [(_find_line(exercise, text), text) for text in (exercise.fault, *exercise.also_faulty)]


def _find_line(exercise: Exercise, wanted: str) -> int:
    """Return the number of a line of the stub. Raises UserError unless it occurs exactly once."""

    def numbers(text: str) -> list[int]:
        return [number for number, line in enumerate(text.splitlines(), 1) if line.strip() == wanted]

    found = numbers(exercise.stub.read_text())
    if len(found) != 1:  # somebody has written to the stub; a student's copy of the course cannot generate one
        found = numbers(generate_stub(exercise))
    if len(found) != 1:
        raise UserError(f"{exercise.name}: the stub has {len(found)} lines {wanted!r}, and must have one")
    return found[0]


def generate_solution(exercise: Exercise) -> str:
    """Generate the text of the solution."""
    where = f", as it stands in {' and '.join(exercise.modules)}" * bool(exercise.piece)
    usual = [each for each in read_answers(exercise).wrong if not each.name.startswith("wrong_cheat_")]
    wrong = [f"* {each.note}" for each in usual if each.note]
    docstring = [
        *_wrap_paragraphs(f"{exercise.title}: the solution{where}."),
        "",
        *_wrap_paragraphs(exercise.why),
        "",
        "Usual wrong answers:",
        *(line for each in wrong for line in textwrap.wrap(each, _WIDTH, subsequent_indent="  ")),
    ]
    return _format_docstring(docstring) + "\n\n" + solution_code(exercise)


def solution_code(exercise: Exercise) -> str:
    """Generate the code of the solution, without its docstring."""
    return _join_parts(exercise, _sources(exercise)) + "\n"


def generate_answer(exercise: Exercise, name: str, answers: Answers | None = None) -> str:
    """Generate the text of an answer. Raises UserError if its edits do not apply to the solution.

    answers: those that it is one of; None: the exercise's own.
    """
    answers = answers or read_answers(exercise)
    return answer_text(answers[name], _answer_code(exercise, answers, answers[name]))


def write_answer(exercise: Exercise, name: str, folder: Path, answers: Answers | None = None) -> Path:
    """Write an answer to `folder/<exercise>/<name>.py`; return the file. answers: as in `generate_answer`."""
    file = folder / exercise.name / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(generate_answer(exercise, name, answers))
    return file


def _answer_code(exercise: Exercise, answers: Answers, chosen: Answer) -> str:
    """Return the code of an answer, without its note: its own text, edits of the solution, or generated."""
    where = f"{answers.file}: {chosen.name}"
    if chosen.text:
        return chosen.text
    if chosen.edits:
        base = answers[chosen.of] if chosen.of else None
        if base and (base.of or not base.is_right):
            raise UserError(f"{where} may be edits of the solution, or of a right answer that is not `of` another")
        code = _answer_code(exercise, answers, base) if base else solution_code(exercise)
        return apply_edits(code, chosen.edits, where)
    if chosen.name == "wrong_cheat":
        return generated_answers.generate_cheat(exercise)
    if chosen.name in generated_answers.CONSTANT_RESULTS:
        return generated_answers.generate_constant_results(exercise, solution_code(exercise), chosen.name)
    raise UserError(f"{where} has neither edits nor a text; only wrong cheat, zero and constant are generated")


def stub_version(text: str) -> str | None:
    """Return the version of the stub that a learner's file started from; None if it has none."""
    found = _STUB.search(text)
    return found and found[1]


def outdated_files(exercise: Exercise) -> list[Path]:
    """List the generated files that are out of date."""
    wanted = {exercise.stub: generate_stub(exercise), exercise.solution: generate_solution(exercise)}
    return [file for file, text in wanted.items() if not file.exists() or file.read_text() != text]


def write_generated_files(exercise: Exercise) -> list[Path]:
    """Rewrite the generated files that are out of date; return them."""
    changed = outdated_files(exercise)
    for file in changed:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(generate_stub(exercise) if file == exercise.stub else generate_solution(exercise))
    return changed


def _task_lines(exercise: Exercise) -> list[str]:
    """Return the lines of the task: a program's docstring, or the statement and the functions it may call."""
    if not exercise.piece:
        return [*(ast.get_docstring(ast.parse(exercise.source.read_text())) or "").splitlines(), ""]
    calls = ["", "You may call:", *(f"    {call}" for call in exercise.calls), ""]
    return [*exercise.statement.strip().splitlines(), *(calls if exercise.calls else [""])]


def _join_parts(exercise: Exercise, parts: list[str]) -> str:
    """Return the parts of a file, with the imports that they need in front of them."""
    return "\n\n\n".join([_imports(exercise), *parts] if exercise.piece else parts)


def _sources(exercise: Exercise) -> list[str]:
    """Return the source of each symbol of a piece, with decorators; or a program without its docstring."""
    if not exercise.piece:
        text = exercise.source.read_text()
        end = ast.parse(text).body[0].end_lineno
        return ["\n".join(text.splitlines()[end:]).strip()]
    return [_source(exercise, piece) for piece in exercise.pieces]


def _source(exercise: Exercise, piece: str) -> str:
    """Return the source of one symbol of a piece."""
    module, _, name = piece.partition(":")
    text = module_file(module).read_text()
    nodes = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    if name not in nodes:
        raise UserError(f"{exercise.name}: {module} has no {name}")
    node = nodes[name]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[start - 1 : node.end_lineno])


def _apply_changes(exercise: Exercise) -> list[str]:
    """Return the sources with the stub's changes applied."""
    sources = _sources(exercise)
    for change in exercise.changes:
        for i, source in enumerate(sources):
            if (lines := _lines_of(change, source)) is not None:
                sources[i] = _replace_lines(source, lines, change.put)
                break
        else:
            where = exercise.symbols if exercise.piece else exercise.source.name
            raise UserError(f"{exercise.name}: no lines from {change.first!r} to {change.last!r} in {where}")
    return sources


def _lines_of(change: Change, source: str) -> tuple[int, int] | None:
    """Return the first and last line of a change; None unless each occurs exactly once."""
    lines = [line.strip() for line in source.splitlines()]
    first = [i for i, line in enumerate(lines) if line.startswith(change.first)]
    last = [i for i, line in enumerate(lines) if line.startswith(change.last)]
    return (first[0], last[0]) if len(first) == len(last) == 1 and first[0] <= last[0] else None


def _replace_lines(source: str, lines: tuple[int, int], put: str) -> str:
    """Return the source with lines first to last (from 0) replaced by `put`, at their indentation."""
    text = source.splitlines()
    indent = re.match(r" *", text[lines[0]])[0]
    return "\n".join([*text[: lines[0]], *textwrap.indent(put.strip("\n"), indent).splitlines(), *text[lines[1] + 1 :]])


def _imports(exercise: Exercise) -> str:
    """Generate the imports that the symbols need, including those of names from their own modules."""
    statements: list[str] = []
    named: dict[str, set[str]] = {}  # imported names, by module
    for module in exercise.modules:
        tree = ast.parse(module_file(module).read_text())
        sources = [_source(exercise, piece) for piece in exercise.pieces if piece.startswith(f"{module}:")]
        used = {name for source in sources for name in _used_names(ast.parse(source))}
        used -= set(exercise.symbols)
        own = {name for node in tree.body for name in _defined_names(node)} & used - _local_names(sources)
        if own:
            named.setdefault(module, set()).update(own)
        for node in _top_level_statements(tree):
            for alias in getattr(node, "names", []):
                if (alias.asname or alias.name).split(".")[0] not in used:
                    continue
                if isinstance(node, ast.ImportFrom) and not alias.asname:
                    named.setdefault(node.module, set()).add(alias.name)
                else:
                    where = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    statements.append(f"{where}import {ast.unparse(alias)}")
    statements += [
        f"from {module} import {', '.join(sorted(names, key=_name_sort_key))}" for module, names in named.items()
    ]
    groups = {"standard": [], "other": [], "ours": []}
    for statement in dict.fromkeys(statements):
        top = re.split(r"[ .]", statement)[1]
        kind = "ours" if top == "minidist" else "other" if top in ("numpy", "safetensors", "torch") else "standard"
        groups[kind].append(statement)
    return "\n\n".join(
        "\n".join(map(_split_import, sorted(lines, key=_import_sort_key))) for lines in groups.values() if lines
    )


def _used_names(tree: ast.Module) -> set[str]:
    """Return all names in some code, also those in annotations that are strings."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for text in annotations:
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            found |= _used_names(ast.parse(text.value))
    return found


def _local_names(sources: list[str]) -> set[str]:
    """Return the names of all variables that some functions and classes assign."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _top_level_statements(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module, with those under `if TYPE_CHECKING`."""
    return [each for node in tree.body for each in (node.body if isinstance(node, ast.If) else [node])]


def _split_import(statement: str) -> str:
    """Give each name of an import a line of its own if the statement is too long for one line."""
    if len(statement) <= _LINE:
        return statement
    module, names = statement.split(" import ")
    return f"{module} import (\n    " + ",\n    ".join(names.split(", ")) + ",\n)"


def _defined_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.name} if hasattr(node, "name") else set()


def _name_sort_key(name: str) -> tuple[int, str]:
    """Return the sort key of a name in an import: constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name.lower())


def _import_sort_key(statement: str) -> tuple[bool, str, tuple[int, str]]:
    """Return the sort key of an import: `import` before `from`, then by module and first name."""
    words = statement.replace(",", "").split()
    return words[0] == "from", words[1], _name_sort_key(words[-1] if len(words) < 4 else words[3])


def _wrap_paragraphs(text: str) -> list[str]:
    """Return the lines of a text whose paragraphs are wrapped."""
    paragraphs = [textwrap.wrap(" ".join(part.split()), _WIDTH) for part in text.strip().split("\n\n")]
    return [line for i, lines in enumerate(paragraphs) for line in ([""] * bool(i) + lines)]


def _format_docstring(lines: list[str]) -> str:
    """Return the source of a docstring."""
    return '"""' + "\n".join(lines) + '\n"""'
