"""The notebooks build the package: each runs as stored, and the package rebuilt from the cells and the solutions of a
chapter is the package.

The rebuilt package is compared as source code, so the tests of the package hold for it too. `make test-all` also runs
those that chapter.toml names.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

from exercises.catalogue import ROOT
from minidist.tools.notebook import weave
from tests.helpers.chapters import CHAPTERS, each_chapter, exercises_of

DEADLINE_S = 200
CELL_S = 90
RED_S = 60
NOTEBOOKS = [file for chapter in CHAPTERS for file in sorted(chapter.glob("*.ipynb"))]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_notebook_gives_what_is_stored(notebook, tmp_path):
    """By nbval, every cell compared but those with a tag; in a folder of its own, where there is no learner."""
    folder = tmp_path / "chapters" / notebook.parent.name
    folder.mkdir(parents=True)
    shutil.copy(notebook, folder)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += [
        "-q",
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout",
        str(CELL_S),
        "--durations=5",
        str(folder),
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert [path.name for path in folder.iterdir()] == [notebook.name]


def texts(chapter: Path) -> dict[str, str]:
    """The source of every piece that the chapter's cells and solutions hold."""
    found = {}
    for file in chapter.glob("*.ipynb"):
        found |= {name: source for _, name, source in weave.pieces(nbformat.read(file, as_version=4))}
    for exercise in exercises_of(chapter):
        if exercise.kind == "piece":
            solution = exercise.solution.read_text()
            piece_of = {piece.partition(":")[2]: piece for piece in exercise.pieces}
            for node in ast.parse(solution).body:
                if (name := getattr(node, "name", None)) in piece_of:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    found[piece_of[name]] = "\n".join(solution.splitlines()[first - 1 : node.end_lineno])
    return found


def rebuilt(folder: Path, pieces: dict[str, str]) -> None:
    """A copy of the package and its tests, with these pieces in the place of the package's own text."""
    for name in ("minidist", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "faults"))
    options = "-q -p no:cacheprovider -m 'not exhaustive'"
    (folder / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\naddopts = "{options}"\n')
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


def run_tests(folder: Path, names: list[str], deadline_s: float) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", *(f"tests/{name}" for name in names)]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=deadline_s)


@each_chapter
def test_the_package_rebuilt_from_cells_and_solutions_is_the_package(chapter, tmp_path):
    pieces = texts(chapter)
    assert len(pieces) > 2
    rebuilt(tmp_path, pieces)
    for file in sorted({Path(*piece.partition(":")[0].split(".")).with_suffix(".py") for piece in pieces}):
        of_cells, of_package = (ast.dump(ast.parse((root / file).read_text())) for root in (tmp_path, ROOT))
        assert of_cells == of_package, file


@pytest.mark.exhaustive
@each_chapter
def test_a_room_rebuilt_from_cells_and_solutions_passes_its_tests(chapter, tmp_path):
    pieces = texts(chapter)
    assert len(pieces) > 2
    rebuilt(tmp_path, pieces)
    ran = run_tests(tmp_path, tomllib.loads((chapter / "chapter.toml").read_text())["tests"], DEADLINE_S)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:]


@pytest.mark.parametrize(
    "piece",
    [
        "minidist.data.partition:permutation",
        pytest.param("minidist.data.partition:block", marks=pytest.mark.exhaustive),
    ],
)
def test_a_room_with_a_wrong_cell_fails_them(piece, tmp_path):
    [chapter] = [chapter for chapter in CHAPTERS if chapter.name == "01_data_distribution"]
    head = texts(chapter)[piece].partition(":\n")[0]
    rebuilt(tmp_path, {piece: head.partition(" ->")[0] + ":\n    return np.arange(n)\n"})
    ran = run_tests(tmp_path, ["data/test_partition.py"], RED_S)
    assert ran.returncode == 1 and " failed" in ran.stdout, ran.stdout[-4000:]
