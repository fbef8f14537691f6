"""The notebooks build the package: each reproduces its stored outputs, and a copy of the package whose symbols come
from the cells and solutions of a chapter equals the package.

The rebuilt package is compared as source code, so the tests of the package cover it too.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from exercises.catalogue import ROOT
from minidist.tools.notebook import weave
from tests.helpers.chapters import CHAPTERS, each_chapter, exercises_of

DEADLINE_S = 1200
CELL_S = 300
# pytest, without a package that jsonschema would import (see tests/conftest.py).
PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.console_main())"
NOTEBOOKS = [file for chapter in CHAPTERS for file in sorted(chapter.glob("*.ipynb"))]


@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_reproduces_its_stored_outputs(notebook, tmp_path):
    """nbval executes it once and compares every cell without an ignore tag, in a folder without a learner's work."""
    folder = tmp_path / "chapters" / notebook.parent.name
    folder.mkdir(parents=True)
    shutil.copy(notebook, folder)
    command = [sys.executable, "-c", PYTEST, "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += [
        "-q",
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout",
        str(CELL_S),
        "--durations=5",
        str(folder),
    ]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]
    assert [path.name for path in folder.iterdir()] == [notebook.name]


def texts(chapter: Path) -> dict[str, str]:
    """The source of every symbol that a cell or a solution of the chapter defines."""
    results = {}
    for file in chapter.glob("*.ipynb"):
        results |= {name: source for _, name, source in weave.find_piece_cells(nbformat.read(file, as_version=4))}
    for exercise in exercises_of(chapter):
        if exercise.kind == "piece":
            solution = exercise.solution.read_text()
            piece_of = {piece.partition(":")[2]: piece for piece in exercise.pieces}
            for node in ast.parse(solution).body:
                if (name := getattr(node, "name", None)) in piece_of:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    results[piece_of[name]] = "\n".join(solution.splitlines()[first - 1 : node.end_lineno])
    return results


def rebuilt(folder: Path, pieces: dict[str, str]) -> None:
    """Copy the package to `folder`, with these symbols replaced."""
    shutil.copytree(ROOT / "minidist", folder / "minidist", ignore=shutil.ignore_patterns("__pycache__"))
    for piece, text in pieces.items():
        module, _, path = piece.partition(":")
        file = (folder / Path(*module.split("."))).with_suffix(".py")
        source, nodes = file.read_text(), ast.parse(file.read_text()).body
        for part in path.split("."):
            node = next(node for node in nodes if getattr(node, "name", None) == part)
            nodes = getattr(node, "body", [])
        lines = source.splitlines()
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        indented = [" " * node.col_offset + line if line else line for line in text.splitlines()]
        file.write_text("\n".join([*lines[: first - 1], *indented, *lines[node.end_lineno :]]) + "\n")


def differing(folder: Path, pieces: dict[str, str]) -> list[Path]:
    """The files of the rebuilt package whose code is not that of the package; comments do not count."""
    files = sorted({Path(*piece.partition(":")[0].split(".")).with_suffix(".py") for piece in pieces})
    code = {root: [ast.dump(ast.parse((root / file).read_text())) for file in files] for root in (folder, ROOT)}
    return [file for file, one, other in zip(files, *code.values(), strict=True) if one != other]


@each_chapter
def test_the_package_rebuilt_from_cells_and_solutions_is_the_package(chapter, tmp_path):
    pieces = texts(chapter)
    assert len(pieces) > 2
    rebuilt(tmp_path, pieces)
    assert differing(tmp_path, pieces) == []


WRONG = ["minidist.data.partition:permutation", "minidist.data.partition:block_partition"]


def with_a_wrong_cell(piece: str) -> dict[str, str]:
    """The signature of the package's function, and another body."""
    [chapter] = [chapter for chapter in CHAPTERS if chapter.name == "01_data_distribution"]
    head = texts(chapter)[piece].partition(":\n")[0]
    return {piece: head.partition(" ->")[0] + ":\n    return np.arange(n)\n"}


@pytest.mark.parametrize("piece", WRONG)
def test_a_package_rebuilt_from_a_wrong_cell_differs(piece, tmp_path):
    pieces = with_a_wrong_cell(piece)
    rebuilt(tmp_path, pieces)
    assert differing(tmp_path, pieces) == [Path("minidist/data/partition.py")]
