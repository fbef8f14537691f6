"""Stubs and solutions, generated from the source of the package.

A solution is the piece as it stands in the package, in a file of its own: the imports it needs, then the symbols, with
a note on why it is so and what usually goes wrong. A stub is the same with the lines that exercise.toml declares blank
replaced by one `raise NotImplementedError`.
"""

import ast
import hashlib
import re
import textwrap
from pathlib import Path

from exercises.catalogue import ROOT, Blank, Exercise
from minidist.errors import UserError

_WIDTH = 118
_STUB = re.compile(r"^Stub ([0-9a-f]{8})\.$", re.MULTILINE)


def stub(exercise: Exercise) -> str:
    """The text of the learner's file."""
    body = _imports(exercise) + "\n\n\n" + "\n\n\n".join(_blanked(exercise))
    told = [
        f"{exercise.title}.",
        "",
        *_wrapped(f"Write the missing lines of {' and '.join(exercise.symbols)}; the docstring says what is asked."),
        *_wrapped(f"You may call: {', '.join(exercise.calls)}."),
        f"Check it with: python -m exercises check {exercise.name}",
        "",
        f"Stub {hashlib.sha256(body.encode()).hexdigest()[:8]}.",
    ]
    return _docstring(told) + "\n\n" + body + "\n"


def empty(exercise: Exercise) -> str:
    """The stub with nothing in the place of the missing lines: what a learner has who deletes the `raise`."""
    return re.sub(r"raise NotImplementedError\(.*\)", "pass", stub(exercise))


def solution(exercise: Exercise) -> str:
    """The text of the solution."""
    wrong = [f"* {says}" for _, says in wrong_answers(exercise) if says]
    told = [
        f"{exercise.title}: the solution, as it stands in {exercise.module}.",
        "",
        *_wrapped(exercise.why),
        "",
        "Usual wrong answers:",
        *(line for each in wrong for line in textwrap.wrap(each, _WIDTH, subsequent_indent="  ")),
    ]
    return _docstring(told) + "\n\n" + _imports(exercise) + "\n\n\n" + "\n\n\n".join(_sources(exercise)) + "\n"


def wrong_answers(exercise: Exercise) -> list[tuple[str, str]]:
    """(test that must catch it, what is wrong with it) of each wrong answer, by the first line of its docstring."""
    found = []
    for file in sorted(exercise.answers.glob("wrong_*.py")):
        try:
            docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        except SyntaxError:
            docstring = ""
        test, _, says = " ".join(docstring.split()).partition(": ")
        found.append((test, says))
    return found


def version(text: str) -> str | None:
    """Which stub a learner's file began as; None when it does not say."""
    found = _STUB.search(text)
    return found and found[1]


def drift(exercise: Exercise) -> list[Path]:
    """The generated files that are not what would be generated now."""
    wanted = {exercise.stub: stub(exercise), exercise.solution: solution(exercise)}
    return [file for file, text in wanted.items() if not file.exists() or file.read_text() != text]


def generate(exercise: Exercise) -> list[Path]:
    """Write the files that have drifted; returns them."""
    changed = drift(exercise)
    for file in changed:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stub(exercise) if file == exercise.stub else solution(exercise))
    return changed


def _module_text(exercise: Exercise) -> str:
    return (ROOT / Path(*exercise.module.split("."))).with_suffix(".py").read_text()


def _sources(exercise: Exercise) -> list[str]:
    """The source of each symbol, decorators included."""
    text = _module_text(exercise)
    nodes = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    found = []
    for name in exercise.symbols:
        if name not in nodes:
            raise UserError(f"{exercise.name}: {exercise.module} has no {name}")
        node = nodes[name]
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found.append("\n".join(text.splitlines()[start - 1 : node.end_lineno]))
    return found


def _blanked(exercise: Exercise) -> list[str]:
    sources, left = _sources(exercise), list(exercise.blank)
    for i, source in enumerate(sources):
        for blank in list(left):
            if (lines := _lines_of(blank, source)) is not None:
                left.remove(blank)
                sources[i] = source = _without(source, lines, blank.say)
    if left:
        raise UserError(f"{exercise.name}: no lines from {left[0].first!r} to {left[0].last!r} in {exercise.symbols}")
    return sources


def _lines_of(blank: Blank, source: str) -> tuple[int, int] | None:
    """First and last line of the blank; None when the source has no such line, or several."""
    lines = [line.strip() for line in source.splitlines()]
    first = [i for i, line in enumerate(lines) if line.startswith(blank.first)]
    last = [i for i, line in enumerate(lines) if line.startswith(blank.last)]
    return (first[0], last[0]) if len(first) == len(last) == 1 and first[0] <= last[0] else None


def _without(source: str, lines: tuple[int, int], say: str) -> str:
    text = source.splitlines()
    indent = re.match(r" *", text[lines[0]])[0]
    return "\n".join([*text[: lines[0]], f'{indent}raise NotImplementedError("{say}")', *text[lines[1] + 1 :]])


def _imports(exercise: Exercise) -> str:
    """The imports of the module that the symbols use, and an import of the module's own names."""
    tree = ast.parse(_module_text(exercise))
    used = {n.id for source in _sources(exercise) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
    own = {name for node in tree.body for name in _defined(node)} & used - set(exercise.symbols)
    statements = [kept for node in tree.body if (kept := _used_part(node, used))]
    if own:
        statements.append(f"from {exercise.module} import {', '.join(sorted(own, key=_case))}")
    groups = {"standard": [], "other": [], "ours": []}
    for statement in statements:
        top = re.split(r"[ .]", statement)[1]
        kind = "ours" if top == "minidist" else "other" if top in ("numpy", "torch") else "standard"
        groups[kind].append(statement)
    return "\n\n".join("\n".join(sorted(lines, key=_import_order)) for lines in groups.values() if lines)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.name} if hasattr(node, "name") else set()


def _used_part(node: ast.stmt, used: set[str]) -> str | None:
    """An import statement with the names that are used; None for anything else, or when none is."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return None
    kept = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used]
    if not kept:
        return None
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(kept))
    return ast.unparse(ast.ImportFrom(node.module, sorted(kept, key=lambda alias: _case(alias.name)), node.level))


def _case(name: str) -> tuple[int, str]:
    """How names of one import are sorted: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def _import_order(statement: str) -> tuple[bool, str]:
    return statement.startswith("from"), re.split(r" ", statement)[1]


def _wrapped(text: str) -> list[str]:
    paragraphs = [textwrap.wrap(" ".join(part.split()), _WIDTH) for part in text.strip().split("\n\n")]
    return [line for i, lines in enumerate(paragraphs) for line in ([""] * bool(i) + lines)]


def _docstring(lines: list[str]) -> str:
    return '"""' + "\n".join(lines) + '\n"""'
