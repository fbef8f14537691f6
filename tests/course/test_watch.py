"""`python -m exercises watch`: saved files are checked, a pass leads to the next, Ctrl-C leaves no process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exercises import stubs
from exercises.catalogue import ROOT, Catalogue
from exercises.watch import Watcher
from exercises.work import Work
from minidist.errors import UserError
from tests.helpers.processes import is_alive, needs_proc, wait_until
from tests.helpers.warm_python import warm_python

CATALOGUE = Catalogue()
BLOCK, STRIDED = CATALOGUE["block_partition"], CATALOGUE["strided_partition"]


@pytest.fixture
def work(tmp_path):
    work = Work(tmp_path / "mine")
    work.update(CATALOGUE)
    return work


@pytest.fixture
def messages():
    return []


@pytest.fixture
def watcher(server, work, messages):
    return Watcher(CATALOGUE, work, server, BLOCK.name, show=messages.append)


def save(work, exercise, answer):
    """Save as an editor does: replace the file by a new one."""
    file = work.file(exercise)
    file.with_suffix(".new").write_text(stubs.generate_answer(exercise, answer))
    os.replace(file.with_suffix(".new"), file)


def test_nothing_is_checked_before_a_save(watcher, messages):
    assert watcher.step() == [] and watcher.step() == []
    assert len(messages) == 1 and messages[0].startswith("next: 1.1 Consecutive blocks (10 points, 10 minutes)\nsave ")


def test_a_saved_file_is_checked_once_writing_has_ended(watcher, work, messages):
    save(work, BLOCK, "wrong_rest_to_last")
    assert watcher.step() == []  # somebody may still be writing
    save(work, BLOCK, "wrong_rest_to_last")
    assert watcher.step() == []
    assert watcher.step() == [BLOCK] and watcher.step() == []
    assert messages[-1].startswith("\nblock_partition: 5 of 10 points\n") and watcher.current is BLOCK
    entry = work.entry(BLOCK)
    assert (entry["attempts"], entry["passed"], entry["points"]) == (1, False, 5)


def test_a_pass_leads_to_the_next_that_is_not_passed(watcher, work, messages):
    following = next(e for e in CATALOGUE.values() if not work.entry(e).get("passed") and e is not BLOCK)
    save(work, BLOCK, "right_loop")
    assert [watcher.step(), watcher.step()] == [[], [BLOCK]]
    assert messages[1].startswith("\nblock_partition: passed, 10 of 10 points\n")
    assert messages[-1].startswith(f"next: {following.section} {following.title}")
    assert watcher.current is following


def test_another_saved_exercise_is_checked(watcher, work, messages):
    save(work, STRIDED, "right_slice")
    assert [watcher.step(), watcher.step()] == [[], [STRIDED]]
    assert "strided_partition: passed" in messages[-1] and watcher.current is BLOCK


def test_after_the_last_exercise_there_is_none(server, work, messages):
    for exercise in CATALOGUE.values():
        if exercise is not BLOCK:
            work.record(exercise, True, exercise.points, b"")
    watcher = Watcher(CATALOGUE, work, server, show=messages.append)
    assert watcher.current is BLOCK
    save(work, BLOCK, "right_loop")
    assert [watcher.step(), watcher.step()] == [[], [BLOCK]]
    assert messages[-1] == "\nyou have passed every exercise"
    with pytest.raises(UserError, match="you have passed every exercise; to watch one all the same"):
        Watcher(CATALOGUE, work, server, show=messages.append)


def test_a_file_that_is_taken_away_ends_nothing(watcher, work, messages):
    work.file(BLOCK).unlink()
    assert [watcher.step(), watcher.step()] == [[], []]
    save(work, BLOCK, "right_loop")
    assert [watcher.step(), watcher.step()] == [[], [BLOCK]]


def test_a_learner_without_files_is_reported_to_start(server, tmp_path):
    with pytest.raises(UserError, match="python -m exercises start"):
        Watcher(CATALOGUE, Work(tmp_path / "none"), server)


@needs_proc
def test_ctrl_c_ends_it_and_its_processes(work):
    """Its children are the rank server and, at this moment, the ranks of a check that does not come to an end."""
    command = [sys.executable, "-u", "-m", "exercises", "--work", str(work.folder), "watch", "block_partition"]
    with warm_python.popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout.readline().startswith("next: 1.1")
        work.file(BLOCK).write_text("while True:\n    pass\n")
        assert wait_until(lambda: len(family(process.pid)) >= 2)
        pids = family(process.pid)
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.wait(timeout=20) == 0
    assert "Traceback" not in out and wait_until(lambda: not any(map(is_alive, pids)))


def family(pid: int) -> list[int]:
    """The processes below this one."""
    found, left = [], [pid]
    while left:
        tasks = Path(f"/proc/{left.pop()}/task").glob("*/children")
        left += (new := [int(word) for task in tasks for word in task.read_text().split()])
        found += new
    return found
