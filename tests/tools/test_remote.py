"""Checkpoints in a remote folder: complete or absent, verified, pruned; a failed upload does not end the run."""

import shutil
import sys
import uuid
from types import SimpleNamespace

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from minidist.checkpoint.folders import complete_checkpoints
from minidist.checkpoint.index import verify_checkpoint
from minidist.checkpoint.save import save_checkpoint
from minidist.comm import World
from minidist.config import CheckpointConfig
from minidist.errors import DamagedError, UserError
from minidist.tools.remote import CheckpointUploader, RemoteFolder, fetch_newer_checkpoint
from tests.helpers.checkpoint_cases import full_shard
from tests.helpers.small_run import read_curve, small_config, train_small, with_changes, write_text


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A remote folder that does not exist yet."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/remote"


def save(root, step):
    return save_checkpoint(root, step, [full_shard("t", torch.full((5,), float(step)))], {})


def upload_steps(url, root, *steps):
    remote = RemoteFolder(url)
    for step in steps:
        remote.upload(save(root, step), step)
    return remote


def test_a_checkpoint_comes_back_as_it_was(url, tmp_path):
    remote = upload_steps(url, tmp_path / "local", 2, 4)
    assert remote.complete_steps() == [2, 4]
    folder = remote.download(4, tmp_path / "other")
    first = tmp_path / "local" / folder.name
    assert not verify_checkpoint(folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in first.iterdir()}
    remote.upload(first, 4)  # again: the copy is replaced
    assert remote.complete_steps() == [2, 4] and not verify_checkpoint(remote.download(4, tmp_path / "third"))


def test_an_interrupted_upload_does_not_count_and_is_deleted_later(url, tmp_path, monkeypatch):
    remote = upload_steps(url, tmp_path / "local", 2)
    put_file = type(remote._files).put_file

    def interrupted(files, local, path, **options):
        if path.endswith(".safetensors"):
            raise OSError("connection lost")
        return put_file(files, local, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(remote._files), "put_file", interrupted)
        with pytest.raises(OSError, match="connection lost"):
            upload_steps(url, tmp_path / "local", 4)
        with pytest.raises(OSError, match="connection lost"):  # the complete copy of a step does not become a mixture
            upload_steps(url, tmp_path / "local", 2)
    assert remote.complete_steps() == []
    upload_steps(url, tmp_path / "local", 6).prune(keep=1)
    assert remote.complete_steps() == [6] and not remote._files.exists(remote._path(4))


def test_the_newest_and_every_nth_are_kept(url, tmp_path):
    remote = upload_steps(url, tmp_path / "local", 2, 3, 4, 5, 6)
    remote.prune(keep=2, keep_every=3)
    assert remote.complete_steps() == [3, 5, 6]


def test_a_flipped_byte_is_found_and_the_checkpoint_before_is_used(url, tmp_path):
    remote = upload_steps(url, tmp_path / "local", 2, 4)
    path = remote._path(4, "rank-00000.safetensors")
    content = bytearray(remote._files.cat_file(path))
    content[-1] ^= 1
    remote._files.pipe_file(path, bytes(content))
    with pytest.raises(DamagedError, match="the checkpoint of step 4 in .* its checksum is"):
        remote.download(4, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    config = with_changes(small_config(tmp_path / "run", tmp_path), checkpoint__remote=url)
    note = fetch_newer_checkpoint(config)
    assert "step 4" in note and note.endswith(f"downloaded {tmp_path}/run/checkpoints/step-00000002 from {url}")
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [2]
    assert "downloaded" not in fetch_newer_checkpoint(config)  # nothing intact there is newer


def test_a_run_goes_on_from_its_remote_checkpoints_when_its_folder_is_gone(url, tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__every=2, checkpoint__keep=2)
    train_small(World.single(), with_changes(config, folder=tmp_path / "whole"))
    config = with_changes(config, checkpoint__remote=url)
    train_small(World.single(), config, stop_after=5)
    assert RemoteFolder(url).complete_steps() == [4, 5]
    assert fetch_newer_checkpoint(config) is None  # the local folder has the same
    shutil.rmtree(tmp_path / "run")
    assert "step-00000005" in fetch_newer_checkpoint(config)
    train_small(World.single(), config)
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "whole")[5:]
    assert RemoteFolder(url).complete_steps() == [5, 6]
    assert not list((tmp_path / "run").glob("upload-*"))


def test_what_a_killed_run_left_of_its_uploads_is_deleted_when_the_next_run_starts(tmp_path):
    (tmp_path / "upload-00000004").mkdir()
    (tmp_path / "upload-00000004" / "state").write_bytes(bytes(100))
    uploader = CheckpointUploader(CheckpointConfig(remote="memory://left-over"))
    uploader.on_start(SimpleNamespace(folder=tmp_path, world=World.single()))
    left = list(tmp_path.iterdir())
    uploader.close()
    assert left == []


class BrokenOnce(MemoryFileSystem):
    """A file system in memory whose first write fails."""

    protocol = "broken"
    store, pseudo_dirs, has_failed = {}, [""], False

    def put_file(self, *args, **options):
        if not BrokenOnce.has_failed:
            BrokenOnce.has_failed = True
            raise OSError("quota exceeded")
        return super().put_file(*args, **options)


def test_a_failed_upload_is_named_and_the_next_save_tries_again(tmp_path, capsys):
    fsspec.register_implementation("broken", BrokenOnce, clobber=True)
    config = small_config(tmp_path / "run", write_text(tmp_path), checkpoint__remote="broken://run")
    assert train_small(World.single(), config)["step"] == 6
    assert "was not copied to broken://run: OSError: quota exceeded. The run goes on" in capsys.readouterr().out
    assert RemoteFolder("broken://run").complete_steps() == [6]


def test_wrong_urls_and_missing_packages_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="nosuch://a is not a URL that fsspec knows: .*nosuch"):
        RemoteFolder("nosuch://a")
    config = small_config(None, write_text(tmp_path), checkpoint__remote="memory://a")
    with pytest.raises(UserError, match="without --folder"):
        fetch_newer_checkpoint(config)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"run pip install -e '.\[remote\]'; also install the file system's driver"):
        RemoteFolder("memory://a")
