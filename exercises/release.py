"""Writes the course for students: `python -m exercises release FOLDER`.

The copy has no solutions, no catalogue of answers and no tests of the project, and its notebooks have no section
"Solutions". The grader and the tests of the exercises stay, since students check their work with them; so does the
package, which the notebooks, the trainer and the tests use, with the code of the pieces in it.

From the same copy come a workflow for GitHub Classroom (in the copy) and a zip file for Gradescope's autograder.
"""

import json
import re
import shlex
import shutil
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from exercises.catalogue import KINDS, Catalogue, Exercise
from minidist.errors import UserError

MARKER = "student-copy"  # a file in exercises/ by which a copy is known
_FILES = ("README.md", "LICENSE", "CITATION.cff", "Makefile", "pyproject.toml")
_FOLDERS = ("minidist", "chapters", "docs", "images", "launch", "configs", "exercises")
_NOT_COPIED = ("__pycache__", ".ipynb_checkpoints", "answers", "programs", "exercise.toml", "teaching.md", "*.pyc")
_SOLUTIONS = re.compile(r"^## Solutions$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,2} ", re.MULTILINE)
_TIMEOUT_MIN = 5  # of one check on GitHub

_WORKFLOW = """\
# Written by `python -m exercises release`. Students commit work/; each exercise is one test of the assignment.
name: Autograding Tests
on: [push, workflow_dispatch, repository_dispatch]
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - name: Checkout code
        uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: Install
        run: |
          pip install {index}--editable .
"""
_STEP = """\
      - name: {name}
        id: {name}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: "{section} {name}"
          command: python -m exercises check {name}
          timeout: {timeout}
          max-score: {points}
"""
_REPORTER = """\
      - name: Autograding Reporter
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}
        with:
          runners: {names}
"""
_SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image: Python 3.11 or newer, bubblewrap, the course and torch.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y bubblewrap software-properties-common
newest() {{ for v in 3.13 3.12 3.11; do command -v python$v && return; done; false; }}
if ! newest; then
  apt-get install -y python3.12 python3.12-venv || apt-get install -y python3.11 python3.11-venv
fi
apt-get install -y "$(basename "$(newest)")-venv"
"$(newest)" -m venv /opt/minidist
/opt/minidist/bin/pip install {index}--editable /autograder/source/course
# Where bubblewrap is not permitted, answers run as another user: the tests are not for that user.
chmod -R o= /autograder/source/course/exercises/ch*
"""
_RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for every submission.
set -uo pipefail
mkdir -p /autograder/results
chmod -R o= /autograder/submission /autograder/results
cd /autograder/source/course
exec /opt/minidist/bin/python -m exercises.gradescope /autograder/submission /autograder/results/results.json {names}
"""


def write_release(catalogue: Catalogue, folder: Path, exercises: Sequence[Exercise], torch_index: str = "") -> None:
    """Write the copy for students to a new folder. exercises: those that GitHub Classroom grades.

    torch_index: the address of another package index, for torch's CPU build; "": pip's own.

    Raises UserError if the folder is not empty, lies in the course, or if this is such a copy itself.
    """
    root = catalogue.root
    if is_student_copy(root):
        raise UserError(
            f"{root} is a student's copy of the course, which has no solutions; release from the course itself"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; give a new folder for the copy")
    if folder.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{folder} lies in the course itself; give a folder outside {root}")
    for name in _FOLDERS:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    for name in _FILES:
        if (root / name).is_file():
            shutil.copy(root / name, folder / name)
    ignored = (root / ".gitignore").read_text().splitlines() if (root / ".gitignore").is_file() else []
    (folder / ".gitignore").write_text("".join(f"{line}\n" for line in ignored if line != "work/"))  # is handed in
    (folder / "exercises" / MARKER).write_text(
        "A student's copy: without solutions, answers and the project's tests.\n"
    )
    for chapter in sorted({exercise.folder for exercise in catalogue.values()}):
        mine = [exercise for exercise in catalogue.values() if exercise.folder == chapter]
        copy = folder / chapter.relative_to(root)
        tables = tomllib.loads((chapter / "exercise.toml").read_text())
        (copy / "exercise.toml").write_text(_as_toml({name: _without_solution(tables[name]) for name in tables}))
        for exercise in mine:
            if not exercise.piece:  # its program is the solution; the checks need what the stub has of it
                (copy / "programs").mkdir(exist_ok=True)
                shutil.copy(exercise.stub, copy / "programs" / exercise.source.name)
    for notebook in sorted((folder / "chapters").glob("*/*.ipynb")):
        _remove_solutions(notebook)
    workflow = folder / ".github" / "workflows" / "classroom.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(classroom_workflow(exercises, torch_index))


def write_gradescope(release: Path, file: Path, names: Iterable[str], torch_index: str = "") -> None:
    """Write the zip file for Gradescope from a released copy. names: of the exercises to grade; none: all.

    torch_index: as in `write_release`.
    """
    check_zip_name(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (
            ("setup.sh", _SETUP.format(index=_pip_option(torch_index))),
            ("run_autograder", _RUN.format(names=" ".join(names)).rstrip()),
        ):
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text.rstrip() + "\n")
        for path in sorted(release.rglob("*")):
            if path.is_file():
                archive.write(path, f"course/{path.relative_to(release)}")


def check_zip_name(file: Path) -> None:
    """Raise UserError unless the file's name ends in .zip."""
    if file.suffix != ".zip":
        raise UserError(f"Gradescope takes a .zip file; {file.name} is none")


def classroom_workflow(exercises: Sequence[Exercise], torch_index: str = "") -> str:
    """Return the workflow that GitHub Classroom runs: one test per exercise. torch_index: as in `write_release`."""
    steps = [
        _STEP.format(name=each.name, section=each.section, timeout=_TIMEOUT_MIN, points=each.points)
        for each in exercises
    ]
    lines = [
        f'          {each.name.upper()}_RESULTS: "${{{{steps.{each.name}.outputs.result}}}}"' for each in exercises
    ]
    reporter = _REPORTER.format(results="\n".join(lines), names=",".join(each.name for each in exercises))
    return "".join([_WORKFLOW.format(index=_pip_option(torch_index)), *steps, reporter])


def _pip_option(index: str) -> str:
    """Return pip's option for another package index, with a space behind it; "" for none."""
    return f"--extra-index-url {shlex.quote(index)} " if index else ""


def is_student_copy(root: Path) -> bool:
    """Return whether `write_release` has written this course."""
    return (root / "exercises" / MARKER).exists()


def _without_solution(table: dict[str, Any]) -> dict[str, Any]:
    """Return an exercise's table without its note on the solution and the solution's lines, which only authors need."""
    kept = {**table, "why": ""}
    if "blank" in KINDS[table["kind"]]:
        return {**kept, "blank": [{"first": "", "last": "", "say": ""}]}
    return {**kept, "changes": [{"first": "", "last": "", "put": ""}]}


def _as_toml(tables: dict[str, dict[str, Any]]) -> str:
    """Return tables of texts, numbers and lists as TOML."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # texts, integers and booleans have the same form in JSON


def _remove_solutions(notebook: Path) -> None:
    """Remove the section "Solutions" from a notebook, up to the next heading of its level."""
    content, kept, removing = json.loads(notebook.read_text()), [], False
    for cell in content["cells"]:
        text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
        if found := _SOLUTIONS.search(text):
            removing = True
            if before := text[: found.start()].rstrip():
                kept.append({**cell, "source": before.splitlines(keepends=True)})
            continue
        removing = removing and not _HEADING.search(text)
        if not removing:
            kept.append(cell)
    notebook.write_text(json.dumps({**content, "cells": kept}, indent=1, ensure_ascii=False) + "\n")
