"""The copy of the course for students, Gradescope's zip file and GitHub Classroom's workflow."""

import json
import os
import stat
import subprocess
import sys
import tomllib
import zipfile

import pytest

from exercises import release
from exercises.__main__ import main
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.grade import Record
from exercises.gradescope import as_results
from exercises.gradescope import main as gradescope_main
from tests.helpers.warm_python import warm_libraries

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A released copy, and beside it the zip file for Gradescope."""
    folder = tmp_path_factory.mktemp("release") / "course"
    words = ["release", str(folder), "--gradescope", str(folder.parent / "autograder.zip")]
    assert main(words) == 0
    return folder


def run_in(folder, *words):
    """Run `python -m exercises` in a copy, with the copy's own package."""
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "exercises", *words]
    return warm_libraries.run(command, cwd=folder, env=environ, timeout=240)


def test_the_copy_has_no_solution_and_no_answer(copy):
    assert not (copy / "solutions").exists()
    assert not (copy / "tests").exists()
    assert not list(copy.rglob("answers"))
    assert not list(copy.rglob("*.pyc"))
    texts = {file: file.read_text() for file in copy.rglob("*.*") if file.suffix in (".py", ".toml", ".ipynb", ".md")}
    for exercise in CATALOGUE.values():
        notes = [answer.note for answer in read_answers(exercise).by_name.values() if len(answer.note) > 60]
        for secret in [exercise.why.strip().splitlines()[0], *notes]:
            assert not [file for file, text in texts.items() if secret in text], (exercise.name, secret)
        if not exercise.piece:  # a program: its copy is the stub
            program = copy / exercise.source.relative_to(ROOT)
            assert program.read_text() == exercise.stub.read_text() != exercise.source.read_text()
    for notebook in copy.glob("chapters/*/*.ipynb"):
        sources = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
        assert not [source for source in sources if "## Solutions" in source]
        assert len(sources) > 10


def test_the_copy_has_the_same_exercises(copy):
    copied = Catalogue(copy)
    assert list(copied) == list(CATALOGUE)
    for name, exercise in CATALOGUE.items():
        assert copied[name].stub.read_bytes() == exercise.stub.read_bytes()
        assert copied[name].tests() == exercise.tests()
        same = ("kind", "points", "hints", "guards", "symbols", "pieces", "fault", "route", "calls", "statement")
        assert [getattr(copied[name], key) for key in same] == [getattr(exercise, key) for key in same]


def test_the_copy_works(copy):
    started = run_in(copy, "start")
    assert started.returncode == 0, started.stderr
    assert f"work: {len(CATALOGUE)} exercises and " in started.stdout and list(copy.glob("work/chapters/*/*.ipynb"))
    mine = copy / "work" / "exercises" / BLOCK.chapter / "block_partition.py"
    refused = run_in(copy, "check", "block_partition")
    assert "not written yet" in refused.stdout
    mine.write_bytes(BLOCK.solution.read_bytes())
    passed = run_in(copy, "check", "block_partition")
    assert "passed, 10 of 10 points" in passed.stdout, passed.stderr
    assert run_in(copy, "list").stdout.count("\n") == len(CATALOGUE)
    assert "work/" not in (copy / ".gitignore").read_text().splitlines()  # which students hand in
    lab = run_in(copy, "lab", "--version")  # what `make lab` starts; the option goes to JupyterLab
    assert lab.returncode == 0, lab.stderr
    solution = run_in(copy, "solution", "block_partition")
    assert solution.returncode == 2
    assert "solution needs the solutions and answers, which this student's copy of the course lacks" in solution.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["drifting_elements", "which_rank_hangs"])
def test_programs_and_predictions_are_checked_in_the_copy(copy, name, tmp_path):
    exercise = CATALOGUE[name]
    answer = run_in(copy, "check", name, "--file", str(exercise.solution))
    assert "passed" in answer.stdout, answer.stdout + answer.stderr


def test_a_release_is_refused_where_it_would_mix_with_other_files(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["release", str(tmp_path)]) == 2
    assert "is not empty; give a new folder for the copy" in capsys.readouterr().err
    assert main(["release", str(ROOT / "new")]) == 2
    assert "lies in the course itself; give a folder outside" in capsys.readouterr().err
    assert main(["release", str(tmp_path / "new"), "--gradescope", "grader.tar"]) == 2
    assert "Gradescope takes a .zip file; grader.tar is none" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_exercise_tables_survive_toml():
    table = {"a": {"hints": ['a "quoted" \\ text\nwith lines, é'], "points": 3, "blank": [{"first": "", "say": "x"}]}}
    assert tomllib.loads(release._as_toml(table)) == table


def test_the_workflow_has_a_test_for_each_exercise():
    chosen = [CATALOGUE["block_partition"], CATALOGUE["ring_all_reduce"]]
    text = release.classroom_workflow(chosen, "https://wheels.example/cpu")
    assert "pip install --extra-index-url https://wheels.example/cpu --editable ." in text
    assert "pip install --editable ." in release.classroom_workflow(chosen)
    assert text.count("uses: classroom-resources/autograding-command-grader@v1") == 2
    assert "command: python -m exercises check ring_all_reduce" in text
    assert f"max-score: {CATALOGUE['ring_all_reduce'].points}" in text
    assert 'BLOCK_PARTITION_RESULTS: "${{steps.block_partition.outputs.result}}"' in text
    assert "runners: block_partition,ring_all_reduce" in text
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load(text)["jobs"]["run-autograding-tests"]["steps"]
    assert [step["id"] for step in steps if "id" in step] == ["block_partition", "ring_all_reduce"]


def test_the_zip_file_for_gradescope(copy, tmp_path):
    with zipfile.ZipFile(copy.parent / "autograder.zip") as archive:
        names = archive.namelist()
        for name in ("setup.sh", "run_autograder"):
            assert archive.getinfo(name).external_attr >> 16 & stat.S_IXUSR
            archive.extract(name, tmp_path)
            assert subprocess.run(["bash", "-n", str(tmp_path / name)], check=False).returncode == 0
    assert "course/exercises/gradescope.py" in names
    assert not [name for name in names if "solutions/" in name or "answers/" in name]


def test_results_are_in_gradescopes_format(tmp_path, capsys):
    records = [
        Record("student", "block_partition", BLOCK.chapter, "passed", 10, 10, seconds=1.2),
        Record("student", "ring_all_reduce", "ch", "failed", 3, 14, test="sums", message="it differs", seconds=2.0),
        Record("student", "rank_and_world", "ch", "missing", 0, 10),
    ]
    results = as_results(records, CATALOGUE, ["sandbox: bubblewrap"])
    assert [(test["score"], test["max_score"], test["status"]) for test in results["tests"]] == [
        (10, 10, "passed"),
        (3, 14, "failed"),
        (0, 10, "failed"),
    ]
    assert [test["output"] for test in results["tests"]] == ["passed", "sums: it differs", "not handed in"]
    assert results["tests"][0]["name"] == f"{BLOCK.section} block_partition"
    assert results["execution_time"] == 3
    assert gradescope_main([str(tmp_path)]) == 2
    assert "give the folder of the submission and the file for the results" in capsys.readouterr().err
