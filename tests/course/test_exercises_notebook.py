"""Exercises in a notebook: same files and reports as in the shell, and no lost edits."""

import atexit
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("IPython")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from exercises import stubs, train_in_notebook
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.layouts import read_layouts
from exercises.magics import ExerciseMagics
from exercises.train_in_notebook import choose_layouts
from exercises.work import Work
from minidist.data.partition import block_partition as imported_before
from minidist.tools.notebook.course_path import add_course_to_path, find_course_root
from minidist.tools.notebook.magics import RanksMagics

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
STUB, RIGHT = BLOCK.stub.read_text(), stubs.generate_answer(BLOCK, "right_loop")
WRONG = stubs.generate_answer(BLOCK, "wrong_rest_to_last")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A learner's folder, and the notebook's own folder in it as the place where we are."""
    work = Work(tmp_path / "mine")
    work.update(CATALOGUE)
    here = work.folder / "chapters" / "01_data_distribution"
    here.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here)
    return work


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shell = InteractiveShell(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    shell.builtin_trap.deactivate()


@pytest.fixture
def cell(shell, server, capsys):
    """Runs a cell as a notebook would and returns what it printed."""
    ranks = RanksMagics(shell, server)
    shell.register_magics(ranks)
    shell.register_magics(ExerciseMagics(shell, ranks))

    def run(text: str) -> str:
        capsys.readouterr()
        ran = shell.run_cell(text, store_history=True)
        if not isinstance(ran.error_in_exec, UsageError):
            ran.raise_error()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return out + err

    yield run
    ranks.close()


@pytest.fixture
def offered(shell, monkeypatch):
    """The cells that the notebook was asked to add, with a person in front of it."""
    cells = []
    shell.kernel = SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": True}})
    monkeypatch.setattr(shell, "set_next_input", lambda text, replace: cells.append(text))
    return cells


def in_the_shell(work, capsys, *words) -> str:
    main(["--work", str(work.folder), *words])
    return capsys.readouterr().out


def in_notebook_words(report: str) -> str:
    """A report of the shell, with the notebook's magics in place of the shell's commands."""
    report = report.replace("python -m exercises hint", "%hint").replace("python -m exercises solution", "%solution")
    return report.replace("python -m exercises", "!python -m exercises")


def test_a_verdict_is_coloured_and_laid_out_and_its_text_is_escaped(server, tmp_path):
    from exercises.check import check
    from exercises.exercise_display import VerdictDisplay

    file = tmp_path / "answer.py"
    for answer, color, title in ((RIGHT, "#1a7f37", "passed, 10 of 10 points"), (WRONG, "#cf222e", "of 10 points")):
        file.write_text(answer)
        verdict = check(BLOCK, file, server)
        html = VerdictDisplay(verdict, 2)._repr_html_()
        assert html.startswith(f'<div style="border-left: 6px solid {color}') and title in html
        assert html.count("<div>") - html.count("Next hint") >= len(verdict.results)
        assert ("%hint block_partition (2 left)" in html) == (answer == WRONG)
        assert ("<details><summary>Solution of block_partition</summary>" in html) == (answer == RIGHT)
    file.write_text(RIGHT + "raise ValueError('<b>')\n")
    assert "&lt;b&gt;" in VerdictDisplay(check(BLOCK, file, server), 0)._repr_html_()


@pytest.mark.parametrize("answer", [STUB, WRONG, RIGHT], ids=["stub", "wrong", "right"])
def test_check_shows_the_report_of_the_shell_and_records_it(cell, work, capsys, answer):
    work.file(BLOCK).write_text(answer)
    output = cell("%check block_partition")
    entry = work.entry(BLOCK)
    assert output == in_notebook_words(in_the_shell(work, capsys, "check", "block_partition"))
    assert entry["attempts"] == 1 and entry["passed"] == (answer == RIGHT)
    assert work.entry(BLOCK) == {**entry, "attempts": 2}


def test_an_answer_in_a_cell_is_written_to_the_learners_file(cell, work, capsys):
    output = cell(f"%%exercise block_partition\n{WRONG}raise ValueError('here')\n")
    line = 2 + WRONG.count("\n")
    assert f"  line      {line}: raise ValueError('here')" in output
    assert work.file(BLOCK).read_text() == f"\n{WRONG}raise ValueError('here')\n"
    assert output == in_notebook_words(in_the_shell(work, capsys, "check", "block_partition"))
    assert cell(f"%%exercise block_partition\n{RIGHT}").startswith("block_partition: passed, 10 of 10 points\n")
    assert work.entry(BLOCK)["passed"] and [file.name for file in backups(work)] == []


def test_an_untouched_stub_in_a_cell_stays_the_stub(cell, work):
    assert "not written yet" in cell(f"%%exercise block_partition\n{STUB}")
    assert work.file(BLOCK).read_text() == STUB


def test_edits_made_outside_the_notebook_are_kept(cell, work):
    cell(f"%%exercise block_partition\n{WRONG}")
    work.file(BLOCK).write_text("by hand, for an hour\n")
    output = cell(f"%%exercise block_partition\n{RIGHT}")
    (kept,) = backups(work)
    assert kept.read_text() == "by hand, for an hour\n" and kept.name in output
    assert work.file(BLOCK).read_text() == f"\n{RIGHT}"
    assert kept.name not in cell(f"%%exercise block_partition\n{WRONG}") and len(backups(work)) == 1


def test_an_exercise_is_shown_and_its_file_becomes_one_cell(cell, work, offered):
    output = cell("%exercise block_partition")
    assert output.splitlines()[:2] == [
        "Exercise 1.1: Consecutive blocks (block_partition)",
        "difficulty 1 of 5, 10 minutes, 10 points, 3 of 3 hints left (%hint block_partition)",
    ]
    assert "Divide the samples 0 .. n-1" in output and "Stub" not in output
    assert output.endswith("Your file: work/exercises/ch01_data_distribution/block_partition.py\n")
    assert offered == ["%%exercise block_partition\n" + STUB.rstrip("\n")]
    cell("%exercise block_partition")
    assert len(offered) == 1
    cell(offered[0])
    assert work.file(BLOCK).read_text() == STUB and not backups(work)


def test_the_added_cell_has_the_learners_own_text(cell, work, offered):
    work.file(BLOCK).write_text(RIGHT)
    cell("%exercise block_partition")
    assert offered == ["%%exercise block_partition\n" + RIGHT.rstrip("\n")]
    assert "passed" in cell(offered[0]) and not backups(work)


def test_a_notebook_that_has_the_cell_gets_no_second_one(cell, work, offered, tmp_path, monkeypatch):
    notebook = tmp_path / "saved.ipynb"
    notebook.write_text(json.dumps({"cells": [{"source": ["%%exercise block_partition\n", "mine"]}]}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook))
    cell("%exercise block_partition")
    assert not offered
    cell("%exercise strided_partition")
    assert len(offered) == 1


def test_a_program_that_runs_the_notebook_gets_no_cells_and_changes_nothing(cell, work, monkeypatch, shell):
    monkeypatch.setattr(shell, "set_next_input", lambda *_, **__: pytest.fail("a cell was added"))
    before = (work.folder / "progress.json").read_bytes()
    assert "Exercise 1.1" in cell("%exercise block_partition")
    assert (work.folder / "progress.json").read_bytes() == before


def test_the_link_leads_from_the_notebook_to_the_file(work):
    from exercises.exercise_display import ExerciseDisplay

    text = ExerciseDisplay(BLOCK, work)._repr_markdown_()
    link = text.rpartition("(")[2].rstrip(")")
    assert Path(link).resolve() == work.file(BLOCK).resolve() and not Path(link).is_absolute()
    assert link in ExerciseDisplay(BLOCK, None)._repr_markdown_()


def test_powers_in_a_task_are_not_bold_type():
    from exercises.exercise_display import ExerciseDisplay

    display = ExerciseDisplay(CATALOGUE["loss_scaler"], None)
    assert "up to 2**127, and" in repr(display)
    assert r"up to 2\*\*127, and" in display._repr_markdown_()  # two powers in a paragraph are bold type between them


def test_the_stored_display_of_a_changed_exercise_is_updated(tmp_path):
    from exercises.exercise_display import update_stored_displays

    (tmp_path / "exercises").symlink_to(ROOT / "exercises")
    chapter = ROOT / "chapters" / "00_first_run"
    shutil.copytree(chapter, tmp_path / "chapters" / chapter.name)
    assert update_stored_displays(Catalogue(tmp_path)) == []
    notebook = tmp_path / "chapters" / chapter.name / f"{chapter.name}.ipynb"
    original = notebook.read_text()
    notebook.write_text(original.replace("hints left", "clues left"))
    assert update_stored_displays(Catalogue(tmp_path)) == [notebook]
    assert notebook.read_text() == original


def test_hints_are_counted_as_in_the_shell(cell, work, capsys):
    assert cell("%hint block_partition") == f"hint 1 of 3: {BLOCK.hints[0]}\n"
    assert in_the_shell(work, capsys, "hint", "block_partition").splitlines()[1] == f"hint 2 of 3: {BLOCK.hints[1]}"
    assert "1 of 3 hints left" in cell("%exercise block_partition")


def test_the_solution_is_shown_to_those_who_passed_or_ask_for_it_twice(cell, work):
    solution = BLOCK.solution.read_text()
    assert "you have not passed block_partition yet" in cell("%solution block_partition")
    assert solution.strip() in cell("%solution block_partition --anyway")
    cell(f"%%exercise block_partition\n{RIGHT}")
    assert solution.strip() in cell("%solution block_partition")


def pass_exercises(work, *names):
    for name in names:
        exercise = CATALOGUE[name]
        work.file(exercise).write_text(exercise.solution.read_text())
        work.record(exercise, True, exercise.points, work.file(exercise).read_bytes())


def test_nothing_is_trained_before_an_exercise_is_passed(cell, work):
    assert cell("%train flat_parameter zero_stage_one") == (
        "not passed yet: flat_parameter, zero_stage_one; pass one, and this cell trains the model with it\n"
    )
    pass_exercises(work, "flat_parameter")
    work.file(CATALOGUE["flat_parameter"]).write_text("edited")
    told = cell("%train flat_parameter")
    assert told.startswith("the package's flat_parameter is used, not yours: changed since it passed")
    for line, message in (("%train", "write %train and the names"), ("%train falling_loss", "of kind debug, not a")):
        assert message in cell(line)


def test_the_learners_functions_train_beside_the_packages(cell, work, monkeypatch):
    monkeypatch.setattr(train_in_notebook, "STEPS", 4)
    pass_exercises(work, "token_count", "resharding_load")
    file = work.file(CATALOGUE["token_count"])
    halved = file.read_text().replace("return count.item()", "return count.item() / 2")
    assert halved != file.read_text()
    told = {}
    for name, text in (("right", file.read_text()), ("halved", halved)):
        file.write_text(text)
        work.record(CATALOGUE["token_count"], True, 1, file.read_bytes())
        told[name] = cell("%train token_count resharding_load block_partition").splitlines()
    pending, head, title, *rows, difference = told["right"]
    assert pending == "not passed yet: block_partition; the package's own is used"
    assert re.fullmatch(
        r"naive \(--comm.gradients naive on 2 ranks\), with your "
        r"token_count \(\d+ calls\), resharding_load \(\d+ calls\):",
        head,
    )
    losses = [list(map(float, row.split())) for row in rows]
    assert [step for step, _, _ in losses] == [1, 2, 3, 4] and all(yours == ours for _, yours, ours in losses)
    assert difference == "  largest difference between the two losses: 0.0e+00"
    _, yours, ours = map(float, told["halved"][3].split())
    assert yours == pytest.approx(2 * ours, rel=1e-3)


def test_few_layouts_call_all_functions_of_a_chapter():
    layouts = read_layouts()
    assert choose_layouts(["token_count"], layouts) == ["naive"]
    assert choose_layouts(["tree_broadcast", "ring_all_reduce", "halving_doubling"], layouts) == [
        "tree",
        "ring",
        "doubling",
    ]
    assert choose_layouts(["flat_parameter", "zero_stage_one", "zero_stage_three"], layouts) == ["zero 3"]
    assert choose_layouts(["resharding_load"], layouts) == []


def test_a_passed_piece_works_in_this_notebook_and_one_that_fails_does_not(cell, work):
    original = imported_before(5, 2, 0).tolist()
    work.file(BLOCK).write_text(WRONG)
    cell("%check block_partition --install")
    assert imported_before(5, 2, 0).tolist() == original
    work.file(BLOCK).write_text(
        RIGHT + "\n\ndef block_partition(*args, right=block_partition):\n    return ['mine', *right(*args)]\n"
    )
    assert "replaced" not in cell("%check block_partition --install")
    work.file(BLOCK).write_text(
        RIGHT.replace("def block_partition(", "def block_partition(*args):\n    return _mine(*args)\n\n\ndef _mine(")
    )
    assert cell("%check block_partition --install").endswith("minidist.data.partition:block_partition replaced here\n")
    assert imported_before.__code__.co_names == ("_mine",)
    cell("%piece --reset")
    assert imported_before(5, 2, 0).tolist() == original


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%check", "write %check and the name of an exercise: block_partition, "),
        ("%check blok", "there is no exercise 'blok'; "),
        ("%exercise two words", "write %exercise and the name"),
        ("%%exercise block_partition\n\n", "the cell is empty; %exercise block_partition adds one"),
    ],
)
def test_wrong_use_is_answered_in_one_message(cell, work, line, message):
    output = cell(line)
    assert message.split("block_partition, ")[0] in output and len(output.splitlines()) < 5
    assert work.file(BLOCK).read_text() == STUB


def test_outside_of_a_learners_folder_nothing_is_written(cell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in ("%check block_partition", "%hint block_partition", f"%%exercise block_partition\n{RIGHT}"):
        assert "this notebook is not in your folder: python -m exercises start" in cell(line)
    assert "Exercise 1.1" in cell("%exercise block_partition")
    assert [path.name for path in tmp_path.iterdir()] == ["ipython"]


def test_a_notebook_finds_the_course_it_lies_in(tmp_path, monkeypatch):
    course = tmp_path / "course"
    (course / "exercises").mkdir(parents=True)
    (course / "exercises" / "__init__.py").touch()
    notebook = course / "work" / "chapters" / "01_x"
    (course / "work" / "exercises").mkdir(parents=True)
    notebook.mkdir(parents=True)
    assert find_course_root(notebook) == course.resolve()
    assert find_course_root(tmp_path) == ROOT
    monkeypatch.setattr(sys, "path", ["before"])
    add_course_to_path(notebook)
    add_course_to_path(notebook)
    assert sys.path == ["before", str(course.resolve())]


def test_the_extension_loads_what_it_needs(shell, work, capsys):
    shell.run_line_magic("load_ext", "exercises")
    shell.run_line_magic("hint", "block_partition")
    assert "hint 1 of 3" in capsys.readouterr().out
    shell.run_line_magic("unload_ext", "minidist.tools.notebook")


def backups(work) -> list[Path]:
    return sorted(work.file(BLOCK).parent.glob("*.backup-*"))


def test_indented_prose_of_a_statement_is_no_code():
    from exercises.exercise_display import _as_markdown

    lines = ["Two things:", "    first: one", "", "Example: 2 ranks, of which", "    rank 0 has [1].", "    f(1) is 2."]
    lines += ["Checked, on 2 ranks: values. You may", "use 2**3.", "", "You may call:", "    abs(x)"]
    expected = [
        "Two things:",
        "",
        "    first: one",
        "",
        "**Example:** 2 ranks, of which",
        "rank 0 has [1].",
        "f(1) is 2.",
    ]
    expected += [
        "",
        "**Checked, on 2 ranks:** values. You may",
        r"use 2\*\*3.",
        "",
        "**You may call:**",
        "",
        "    abs(x)",
    ]
    assert _as_markdown(lines) == "\n".join(expected)
