"""The learner's folder, and the commands."""

import json
import os
import shutil
import sys

import pytest

from exercises import parity_gate, stubs
from exercises.__main__ import main
from exercises.attempt import grade_attempt
from exercises.catalogue import ROOT, Catalogue
from exercises.gate import Gate
from exercises.parity_gate import ParityResult
from exercises.work import Work
from minidist.errors import UserError
from minidist.tools.launch import RankServer
from tests.helpers.warm_python import warm_python

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
NOTEBOOKS = sorted((ROOT / "chapters").glob("[0-9]*/*.ipynb"))


@pytest.fixture
def work(tmp_path):
    folder = Work(tmp_path / "mine")
    folder.update(CATALOGUE)
    return folder


def tracked() -> dict[str, bytes]:
    """Every file that a learner must never write."""
    folders = (ROOT / "exercises", ROOT / "solutions")
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*.*") if path.suffix != ".pyc"}


# The learner's folder


def test_start_copies_every_stub_and_a_second_time_nothing(work):
    for exercise in CATALOGUE.values():
        assert work.file(exercise).read_bytes() == exercise.stub.read_bytes()
    assert not any(work.update(CATALOGUE).values())


def test_update_renews_what_is_untouched_and_keeps_what_is_edited(work, tmp_path, capsys):
    course = tmp_path / "course"
    shutil.copytree(ROOT / "exercises" / BLOCK.chapter, course / "exercises" / BLOCK.chapter)
    newer = Catalogue(course)
    for name in ("block_partition", "strided_partition"):
        newer[name].stub.write_text(CATALOGUE[name].stub.read_text() + "# newer\n")
    work.file(BLOCK).write_text("mine\n")
    assert not any(work.update(CATALOGUE).values()), "the course has nothing newer than what was copied"
    assert main(["--work", str(work.folder), "--root", str(course), "update"]) == 0
    renewed, kept = capsys.readouterr().out.splitlines()
    assert renewed.endswith("mine: 1 exercise renewed")
    assert kept.startswith("kept ") and kept.endswith(
        "block_partition.py: you have edited it; the course has a newer version"
    )
    assert work.file(BLOCK).read_text() == "mine\n"
    assert work.file(newer["strided_partition"]).read_text().endswith("# newer\n")


def test_start_writes_instructions_for_ai_assistants(work, tmp_path, capsys):
    """They are renewed while they are as they were copied, and kept once the learner has edited them."""
    course, agents = tmp_path / "course", work.folder / "AGENTS.md"
    shutil.copytree(ROOT / "exercises" / BLOCK.chapter, course / "exercises" / BLOCK.chapter)
    words = " ".join(agents.read_text().split())
    for phrase in (
        "Explain",
        "Ask before you tell",
        "exercises hint NAME",
        "Write or complete the body of an exercise",
    ):
        assert phrase in words
    for text in ("newer\n", "newest\n"):
        (course / "exercises" / "learner_agents.md").write_text(text)
        assert main(["--work", str(work.folder), "--root", str(course), "update"]) == 0
        assert capsys.readouterr().out.endswith("mine: AGENTS.md renewed\n") and agents.read_text() == text
    agents.write_text("my own rules\n")
    (course / "exercises" / "learner_agents.md").write_text("newest of all\n")
    assert main(["--work", str(work.folder), "--root", str(course), "update"]) == 0
    assert "AGENTS.md: you have edited it" in capsys.readouterr().out and agents.read_text() == "my own rules\n"


def test_reset_keeps_every_earlier_file(work):
    for text in ("first\n", "second\n"):
        work.file(BLOCK).write_text(text)
        assert work.reset(BLOCK).read_text() == text
    assert work.file(BLOCK).read_bytes() == BLOCK.stub.read_bytes()
    backups = sorted(work.file(BLOCK).parent.glob("block_partition.backup-*.py"))
    assert [file.read_text() for file in backups] == ["first\n", "second\n"]


def test_notebooks_come_without_outputs(tmp_path):
    cells = [
        {"cell_type": "code", "outputs": [{"text": "1"}], "execution_count": 3, "source": "1"},
        {"cell_type": "markdown", "source": "text"},
    ]
    course = tmp_path / "course"
    (course / "chapters" / "01_x").mkdir(parents=True)
    (course / "chapters" / "01_x" / "01_x.ipynb").write_text(json.dumps({"cells": cells}))
    work = Work(tmp_path / "mine")
    (copied,) = work.update(Catalogue(course))["added"]
    code, text = json.loads(copied.read_text())["cells"]
    assert (code["outputs"], code["execution_count"], code["source"]) == ([], None, "1") and text == cells[1]


def test_progress_keeps_the_best_and_what_others_wrote(work):
    file = work.folder / "progress.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "predictions": {"a": 1}}))
    for passed, points in [(True, 10), (False, 2)]:
        work.record(BLOCK, passed, points, b"")
    assert [work.reveal_next_hint(BLOCK) for _ in range(4)] == [1, 2, 3, 3]
    entry = work.entry(BLOCK)
    assert (entry["attempts"], entry["passed"], entry["points"], entry["hints"]) == (2, True, 10, 3)
    assert json.loads(file.read_text())["predictions"] == {"a": 1}


def test_damaged_progress_is_reported_and_not_lost(work):
    (work.folder / "progress.json").write_text("{")
    with pytest.raises(UserError, match="is damaged .* move it away to begin a new one"):
        work.record(BLOCK, True, 10, b"")
    assert (work.folder / "progress.json").read_text() == "{"


def test_a_write_that_fails_leaves_the_old_file(work, monkeypatch):
    before, names = (work.folder / "progress.json").read_bytes(), sorted(work.folder.iterdir())
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        work.record(BLOCK, True, 10, b"")
    assert (work.folder / "progress.json").read_bytes() == before
    assert sorted(work.folder.iterdir()) == names


# The commands


def test_a_learner_solves_one_exercise(tmp_path, capfd):
    """From the first command to a passed exercise, as a learner types it, and no file of the course is written."""
    before, mine = tracked(), tmp_path / "mine"

    def type_in(*words):
        code = main(["--work", str(mine), *words])
        return code, capfd.readouterr().out

    code, out = type_in("start")
    assert code == 0 and f"{len(CATALOGUE)} exercises and {len(NOTEBOOKS)} notebooks added\n" in out
    assert len(out.splitlines()) <= 4 and "check it: python -m exercises check rank_and_world\n" in out
    assert Work(mine).file(CATALOGUE["rank_and_world"]).is_file()
    code, out = type_in("check", "block_partition")
    assert code == 1 and "not written yet: return the indices of this rank's block" in out
    code, out = type_in("hint", "block_partition")
    assert code == 0 and out == f"hint 1 of 3: {BLOCK.hints[0]}\n"
    Work(mine).file(BLOCK).write_text(stubs.generate_answer(BLOCK, "right_loop"))
    code, out = type_in("check", "block_partition")
    assert code == 0 and out.startswith("block_partition: passed, 10 of 10 points\n")
    code, out = type_in("solution", "block_partition")
    assert code == 0 and out == BLOCK.solution.read_text()
    code, out = type_in("progress")
    assert "block_partition           passed, 10 of 10 points, attempts: 2, hints: 1\n" in out
    Work(mine).file(BLOCK).with_name("strided_partition.py").unlink()
    code, out = type_in("update")
    assert code == 0 and out.endswith("mine: 1 exercise added\n") and len(out.splitlines()) == 1
    code, out = type_in("list")
    assert len(out.splitlines()) == len(CATALOGUE) and "passed  Consecutive blocks" in out
    code, out = type_in("reset", "strided_partition")
    assert code == 0 and "strided_partition.py is a new copy of the stub\n" in out
    assert not list(mine.rglob("strided_partition.backup*"))
    code, out = type_in("reset", "block_partition")
    assert code == 0 and "block_partition.backup-1.py" in out
    assert tracked() == before


@pytest.mark.parametrize(
    "words, output",
    [
        (
            ["check", "blok_partition"],
            "exercises: there is no exercise 'blok_partition'; did you mean block_partition?",
        ),
        (["chek", "block_partition"], "there is no command 'chek'; did you mean check?"),
        (["check"], "NAME is missing. The exercise"),
        (["check", "block_partition", "--jsno"], "there is no option --jsno; did you mean --json?"),
        (["check", "block_partition"], "python -m exercises start copies the stubs"),
        (["solution", "block_partition"], "you have not passed block_partition yet"),
    ],
)
def test_impossible_commands_end_in_one_line_and_exit_2(tmp_path, capsys, words, output):
    assert main(["--work", str(tmp_path / "mine"), *words]) == 2
    out, err = capsys.readouterr()
    assert output in err and len(err.splitlines()) == 1 and not out


def test_the_command_runs_from_any_folder(tmp_path):
    command = [
        sys.executable,
        "-m",
        "exercises",
        "--work",
        str(tmp_path / "mine"),
        "check",
        "block_partition",
        "--json",
    ]
    file = ["--file", str(stubs.write_answer(BLOCK, "wrong_list", tmp_path))]
    result = warm_python.run([*command, *file], cwd=ROOT, timeout=240)
    assert result.returncode == 1 and not result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["exercise"] == "block_partition" and not verdict["passed"]
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("words", [["list"], ["check", "block_partition", "--json"]])
def test_a_reader_that_leaves_gets_no_traceback(tmp_path, words):
    """As `| head -1` does, which is gone when the rest is written."""
    mine = tmp_path / "mine"
    Work(mine).update(CATALOGUE)
    command = [sys.executable, "-m", "exercises", "--work", str(mine), *words]
    read, write = os.pipe()
    os.close(read)
    result = warm_python.run(command, cwd=ROOT, stdout=write, timeout=240)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_the_gate_command_says_what_it_checked(tmp_path, capsys):
    assert main(["gate", "strided_partition"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("strided_partition           green") and out.endswith("1 exercise, all green\n")
    assert "in the trainer: not run: no training run calls strided_partition" in out
    assert main(["--root", str(tmp_path), "gate"]) == 1
    assert capsys.readouterr().out == "no exercise was checked\n"


def test_the_gate_command_is_red_if_the_trainer_is_wrong_with_a_right_answer(monkeypatch, capsys):
    result = ParityResult("dp=2", 3, "wrong_rank", ("strided_partition: right_loop differs",))
    monkeypatch.setattr(parity_gate, "judge_in_trainer", lambda exercise, server: result)
    monkeypatch.setattr(Gate, "run", lambda gate, exercises: True)
    assert main(["gate", "strided_partition"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("strided_partition           red") and out.endswith("strided_partition: right_loop differs\n")
    assert "in the trainer: dp=2: 3 right answers, refuses wrong_rank" in out


def test_a_file_that_changes_during_a_check_is_checked_as_it_was(work, monkeypatch, server):
    """All tests see the file as it was when the check began, and that is what counts as passed."""
    right = stubs.generate_answer(BLOCK, "right_loop").encode()
    work.file(BLOCK).write_bytes(right)

    def start(*args, **options):
        work.file(BLOCK).write_text("other = 1\n")
        return RankServer.start(server, *args, **options)

    monkeypatch.setattr(server, "start", start)
    verdict, _ = grade_attempt(BLOCK, work, server)
    assert verdict.passed and verdict.content == right and not work.is_unchanged_since_pass(BLOCK)
    work.file(BLOCK).write_bytes(right)
    assert work.is_unchanged_since_pass(BLOCK)
