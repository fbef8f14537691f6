"""The folder of checkpoints: the latest one, pruning, and what a killed process leaves."""

import json
import os
import sys
from pathlib import Path

import pytest

from minidist.checkpoint.folders import latest_checkpoint, prune_checkpoints
from minidist.errors import UserError
from tests.helpers.checkpoint_cases import load_full_tensors, make_targets, save_sharded_rows
from tests.helpers.warm_python import warm_python


def test_the_latest_checkpoint_is_the_complete_one_with_the_highest_step(tmp_path):
    for step in (9, 100, 20):
        save_sharded_rows(tmp_path, step)
    (tmp_path / "step-00000200.partial").mkdir()
    (tmp_path / "step-00000300").touch()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000100"
    assert latest_checkpoint(tmp_path / "step-00000020") == tmp_path / "step-00000020"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root.rmdir(), "does not exist"),
        (lambda root: root.rmdir() or root.touch(), "is a file"),
        (lambda root: None, "is empty"),
        (
            lambda root: (root / "step-00000004.partial").mkdir(),
            r"only step-00000004\.partial, of which .partial was never finished",
        ),
        (
            lambda root: (root / "a.pt").touch() or (root / "b").touch(),
            r"holds no complete one, only a\.pt, b\. A checkpoint is",
        ),
        (lambda root: save_sharded_rows(root / "checkpoints", 5), r"checkpoints holds step-00000005; give one of them"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused_with_its_contents(tmp_path, make, message):
    root = tmp_path / "run"
    root.mkdir()
    make(root)
    with pytest.raises(UserError, match=message):
        latest_checkpoint(root)


def test_an_unfinished_checkpoint_is_refused_with_the_complete_ones_beside_it(tmp_path):
    save_sharded_rows(tmp_path, 1)
    (tmp_path / "step-00000002.partial").mkdir()
    with pytest.raises(UserError, match="step-00000002.partial was never finished.*holds step-00000001"):
        latest_checkpoint(tmp_path / "step-00000002.partial")


def test_pruning_removes_old_and_unfinished_checkpoints_only(tmp_path):
    for step in range(1, 6):
        save_sharded_rows(tmp_path, step)
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "notes.partial").mkdir()
    removed = prune_checkpoints(tmp_path, keep=2)
    assert [path.name for path in removed] == ["step-00000001", "step-00000002", "step-00000003"]
    assert sorted(os.listdir(tmp_path)) == ["notes.partial", "step-00000004", "step-00000005"]
    with pytest.raises(ValueError, match="cannot keep 0"):
        prune_checkpoints(tmp_path, keep=0)


def test_the_checkpoint_just_written_is_never_pruned(tmp_path):
    for step in (300, 200, 100):
        written = save_sharded_rows(tmp_path, step)
    prune_checkpoints(tmp_path, keep=1, just_saved=written)
    assert sorted(os.listdir(tmp_path)) == ["step-00000100", "step-00000300"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_sharded_rows(tmp_path, 7, value=1.0)
    tensors = make_targets()
    load_full_tensors(save_sharded_rows(tmp_path, 7, value=5.0), tensors)
    assert tensors["params/b"].tolist() == [-5, -5] and os.listdir(tmp_path) == ["step-00000007"]


# A process that is killed


def test_a_process_killed_at_any_step_of_a_save_leaves_the_previous_or_the_new_checkpoint(tmp_path):
    command = [sys.executable, "-m", "tests.helpers.checkpoint_killed", tmp_path, "fast"]
    root = Path(__file__).resolve().parents[2]
    result = warm_python.run(command, cwd=root, timeout=100)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    assert sorted(results) == ["keep one", "new step", "same step"]
    for name, found in results.items():
        values = [outcome["latest"] for outcome in found]
        # First the previous one, from some rename on the new one: never back, and both happen.
        assert set(values) == {10, 20} and values == sorted(values), (name, found)
        assert len(values) > 8, "mkdir, write, chmod, three times fsync and a rename make at least eight moments"
        assert all(len(outcome["all"]) >= 1 for outcome in found)


def test_a_replaced_checkpoint_is_ignored_and_pruned(tmp_path):
    save_sharded_rows(tmp_path, 7)
    (tmp_path / "step-00000007.replaced").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000007"
    prune_checkpoints(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_a_process_killed_while_replacing_leaves_the_old_checkpoint(tmp_path):
    save_sharded_rows(tmp_path, 7, value=3.0)
    os.rename(tmp_path / "step-00000007", tmp_path / "step-00000007.replaced")
    tensors = make_targets()
    load_full_tensors(latest_checkpoint(tmp_path), tensors)
    assert tensors["params/b"].tolist() == [-3, -3]
    prune_checkpoints(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["step-00000007.replaced"]
    save_sharded_rows(tmp_path, 7)
    assert os.listdir(tmp_path) == ["step-00000007"]
