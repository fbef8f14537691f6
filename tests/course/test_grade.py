"""Grading a class: reading submissions, records, resuming, the report, and made submissions."""

import csv
import json
import os
import signal
import subprocess
import sys
import zipfile

import pytest

from exercises import class_report, made_class, sandbox
from exercises.__main__ import main
from exercises.answers import read_answers
from exercises.catalogue import ROOT, Catalogue
from exercises.grade import Record, Records, course_version, write_csv
from exercises.stubs import generate_answer
from exercises.submissions import MAX_BYTES, Submission, digest, read_submission, read_submissions
from minidist.errors import UserError
from tests.helpers.processes import wait_until

CATALOGUE = Catalogue()
BLOCK = CATALOGUE["block_partition"]
RIGHT = BLOCK.solution.read_bytes()
WRONG = next(answer for answer in read_answers(BLOCK).wrong if answer.edits)
# The best sandbox of this machine; without one the same is tested without a sandbox.
KIND = next((kind for kind in sandbox.KINDS if not sandbox.why_not(kind)), "none")


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def write_class(folder):
    """Submissions: one right, one wrong, one that leaves a process, one broken zip, one without this exercise."""
    write(folder / "ann" / "work/exercises" / BLOCK.chapter / "block_partition.py", RIGHT)
    write(folder / "bob/block_partition.py", generate_answer(BLOCK, WRONG.name).encode())
    leaves = b"import pty, time\npid, _ = pty.fork()\nif pid == 0:\n    time.sleep(1000)\n"
    write(folder / "cat/exercises" / BLOCK.chapter / "block_partition.py", leaves + RIGHT)
    write(folder / "dan.zip", b"this is no zip file")
    write(folder / "eve/notes.txt", b"I was ill")


def run_grade(folder, *options):
    return main(["grade", str(folder), "--exercises", "block_partition", "--sandbox", KIND, "--jobs", "1", *options])


# Reading submissions


@pytest.mark.parametrize(
    "name", ["work/exercises/{}/block_partition.py", "exercises/{}/block_partition.py", "block_partition.py"]
)
def test_an_answer_is_found_in_every_layout_of_folder_and_zip(tmp_path, name):
    name = name.format(BLOCK.chapter)
    write(tmp_path / "class/ann" / name, RIGHT)
    with zipfile.ZipFile(tmp_path / "class/bob.zip", "w") as archive:
        archive.writestr(f"some folder/{name}", RIGHT)
        archive.writestr(f"__MACOSX/{name}", b"of another program")
    expected = {"block_partition": RIGHT}
    found = read_submissions(tmp_path / "class", CATALOGUE)
    assert [(each.student, each.answers, each.problems) for each in found] == [
        ("ann", expected, {}),
        ("bob", expected, {}),
    ]


def test_the_copy_in_the_folder_of_its_chapter_counts(tmp_path):
    write(tmp_path / "old/block_partition.py", b"old")
    write(tmp_path / "work/exercises" / BLOCK.chapter / "block_partition.py", RIGHT)
    write(tmp_path / "work/solutions" / BLOCK.chapter / "block_partition.py", b"the solution")
    assert read_submission(tmp_path, "ann", CATALOGUE).answers == {"block_partition": RIGHT}


def test_a_problem_of_one_answer_is_no_problem_of_the_others(tmp_path):
    write(tmp_path / "a/random_partition.py", b"1")
    write(tmp_path / "b/random_partition.py", b"2")
    write(tmp_path / "a/block_partition.py", RIGHT)
    write(tmp_path / "a/ring_all_reduce.py", b"#" * (MAX_BYTES + 1))
    secret = write(tmp_path.parent / "secret.py", b"of the instructor")
    (tmp_path / "a/rank_and_world.py").symlink_to(secret)
    found = read_submission(tmp_path, "ann", CATALOGUE)
    assert dict(found.answers) == {"block_partition": RIGHT}
    assert found.problems == {
        "random_partition": "random_partition.py is there 2 times, with different contents",
        "ring_all_reduce": f"a/ring_all_reduce.py has {MAX_BYTES + 1} bytes; an answer has at most {MAX_BYTES}",
        "rank_and_world": "a/rank_and_world.py is a link",
    }


def test_a_zip_file_is_not_read_beyond_the_limit(tmp_path):
    with zipfile.ZipFile(tmp_path / "ann.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("block_partition.py", b"0" * (64 << 20))
        archive.writestr("../../etc/random_partition.py", b"x = 1")
    found = read_submission(tmp_path / "ann.zip", "ann", CATALOGUE)
    assert "at most" in found.problems["block_partition"]
    assert found.answers == {"random_partition": b"x = 1"}  # read, never unpacked


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder; give the folder that has a folder or a zip file per student"),
        (lambda folder: folder.mkdir(), "has no submission: a folder or a zip file per student"),
        (lambda folder: (folder / "work").mkdir(parents=True), "is the work of one student; give the folder above it"),
        (lambda folder: write(folder / "block_partition.py", RIGHT), "is the work of one student"),
        (lambda folder: (write(folder / "a/x.py", b""), write(folder / "a.zip", b"")), "both a folder and a zip file"),
    ],
)
def test_folders_that_are_no_class_are_refused(tmp_path, capsys, make, message):
    make(tmp_path / "class")
    assert run_grade(tmp_path / "class") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--report", "report.txt"], "a report is written as .html or .md; report.txt is neither"),
        (["--jobs", "0"], "--jobs 0 is not possible; give at least 1"),
        (["--exercises", "block_partitio"], "there is no exercise 'block_partitio'"),
        (["--make-class", "0"], "a class of 0 students cannot be made"),
    ],
)
def test_options_that_are_not_possible(tmp_path, capsys, options, message):
    assert main(["grade", str(tmp_path / "class"), *options]) == 2
    assert message in capsys.readouterr().err


# Grading


def test_a_class_is_graded_and_a_second_run_checks_only_what_is_new(tmp_path, capsys):
    folder = tmp_path / "class"
    write_class(folder)
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "html")}
    options = ["--csv", str(files["csv"]), "--json", str(files["json"]), "--report", str(files["html"])]
    assert run_grade(folder, *options) == 0
    out, err = capsys.readouterr()
    assert f"sandbox: {'NONE' if KIND == 'none' else ''}" in err
    assert err.count("block_partition: ") == 3  # a line for each check
    assert "5 checks, 0 not graded" in out
    with files["csv"].open() as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {"ann": "passed", "bob": "failed", "cat": "passed", "dan": "unreadable", "eve": "missing"}
    assert (rows["ann"]["points"], rows["ann"]["sha256"]) == (str(BLOCK.points), digest(RIGHT))
    assert rows["ann"]["course"] == course_version(ROOT)
    assert rows["bob"]["test"] in [test.id for test in BLOCK.tests()]
    assert "dan.zip cannot be read" in rows["dan"]["message"]
    written = json.loads(files["json"].read_text())
    assert written["students"]["ann"] == {"points": BLOCK.points, "of": BLOCK.points}
    assert [test["id"] for test in written["records"][0]["tests"]] == [test.id for test in BLOCK.tests()]
    assert "block_partition" in files["html"].read_text()

    write(folder / "eve/block_partition.py", RIGHT + b"\n# late\n")
    records = tmp_path / "class.grades.jsonl"
    records.write_text(records.read_text() + '{"student": "zoe", "exer')  # a run that was killed while it wrote
    assert run_grade(folder) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if "block_partition: " in line] == [
        line for line in err.splitlines() if line.startswith("eve block_partition: passed")
    ]
    assert f"eve{' ' * 27}{BLOCK.points:>5} of {BLOCK.points} points" in out
    assert run_grade(folder) == 0
    assert "block_partition: " not in capsys.readouterr().err


@pytest.mark.exhaustive
def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tmp_path):
    folder = tmp_path / "class"
    for number in range(4):
        write(folder / f"s{number}/block_partition.py", RIGHT + f"\n# {number}\n".encode())
    words = ["grade", str(folder), "--exercises", "block_partition", "--sandbox", KIND, "--jobs", "1"]
    command = [sys.executable, "-m", "exercises", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
    try:
        while "s0 block_partition" not in (line := started.stderr.readline()):
            assert line, "it ended before the first check"
        started.send_signal(signal.SIGINT)
        rest = started.stderr.read()
        assert started.wait() == 130
    finally:
        started.kill()
    assert "stopped; the same command goes on" in rest
    assert "Traceback" not in rest
    leftovers = [file.name for file in tmp_path.iterdir() if file.name.startswith("minidist")]
    assert wait_until(lambda: not leftovers), leftovers
    assert len(Records(tmp_path / "class.grades.jsonl").of(read_submissions(folder, CATALOGUE), [BLOCK])) < 4
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert again.returncode == 0, again.stderr
    assert "s0 block_partition" not in again.stderr
    assert "4 checks, 0 not graded" in again.stdout


def test_records_of_another_file_or_course_or_of_an_error_are_checked_again(tmp_path):
    records = Records(tmp_path / "records")
    records.add(Record("ann", "x", "ch", "passed", 1, 1, sha256="1", course="c"))
    records.add(Record("bob", "x", "ch", "error", 0, 1, sha256="1", course="c"))
    read = Records(tmp_path / "records")
    assert read.find("ann", "x", "1", "c") is not None
    assert read.find("ann", "x", "2", "c") is None
    assert read.find("ann", "x", "1", "d") is None
    assert read.find("bob", "x", "1", "c") is None


def test_a_message_cannot_be_a_formula_of_a_spreadsheet(tmp_path):
    write_csv([Record("=cmd()", "x", "ch", "failed", 1, 1, message="@SUM(A1)")], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        row = next(csv.DictReader(file))
    assert (row["student"], row["message"]) == ("'=cmd()", "'@SUM(A1)")


# The report and made classes


def _failed(student, test, message):
    return Record(student, "block_partition", BLOCK.chapter, "failed", 2, BLOCK.points, test=test, message=message)


def test_the_report_names_the_wrong_answer_whose_code_it_is(tmp_path):
    text = generate_answer(BLOCK, WRONG.name)
    submissions = [
        Submission("ann", {"block_partition": text.encode() + b"\n\n# my own comment\n"}),
        Submission("bob", {"block_partition": b"x = 1"}),
        Submission("cat", {"block_partition": RIGHT}),
    ]
    records = [_failed("ann", WRONG.caught_by, "<b>it is wrong</b>\nmore"), _failed("bob", WRONG.caught_by, "other")]
    records.append(Record("cat", "block_partition", BLOCK.chapter, "passed", BLOCK.points, BLOCK.points))
    result = class_report.summarize_exercise(BLOCK, records, submissions)
    assert (result.passed, result.graded, result.missing) == (1, 3, 0)
    assert result.mean == pytest.approx((BLOCK.points + 4) / 3)
    by_message = {failure.says: failure for failure in result.failures}
    assert by_message["<b>it is wrong</b>"].notes == {WRONG.note: 1}
    assert by_message["<b>it is wrong</b>"].is_exact
    assert not by_message["other"].is_exact
    assert WRONG.note in by_message["other"].notes
    for name in ("report.md", "report.html"):
        class_report.write_report(tmp_path / name, submissions, [BLOCK], records)
        written = (tmp_path / name).read_text()
        assert "&lt;b&gt;it is wrong" in written
        assert "1 of 3" in written
        assert "<b>it" not in written


def test_made_submissions_are_different_files_of_every_exercise(tmp_path):
    made = made_class.make_class(CATALOGUE, tmp_path / "class", 3)
    assert [path.name for path in made] == ["student-001", "student-002", "student-003.zip"]
    found = read_submissions(tmp_path / "class", CATALOGUE)
    contents = [content for submission in found for content in submission.answers.values()]
    assert len(set(contents)) == len(contents) > 2 * len(CATALOGUE)
    assert not any(submission.problems for submission in found)
    with pytest.raises(UserError, match="is not empty"):
        made_class.make_class(CATALOGUE, tmp_path / "class", 1)
