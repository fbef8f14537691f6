"""Saving while training goes on: what a checkpoint captures, when it counts, and how a failure is reported."""

import pickle
import threading

import pytest
import torch

from minidist.checkpoint import save
from minidist.checkpoint.folders import latest_checkpoint
from minidist.checkpoint.index import verify_checkpoint
from minidist.checkpoint.load import read_index
from minidist.checkpoint.save import CheckpointSaver, save_checkpoint
from minidist.errors import RunError
from tests.helpers.checkpoint_cases import full_shard, load_full_tensors, read_files, run_on_threads

DEADLINE_S = 20.0


@pytest.fixture
def disk(monkeypatch):
    """A disk that writes nothing until `disk.set()`."""
    ready, real = threading.Event(), save.write_tensor_file

    def write_tensor_file(file, tensors):
        assert ready.wait(DEADLINE_S)
        return real(file, tensors)

    monkeypatch.setattr(save, "write_tensor_file", write_tensor_file)
    yield ready
    ready.set()


def load_value(path, shape=(4,)):
    tensor = torch.zeros(shape)
    load_full_tensors(path, {"w": tensor})
    return tensor


def test_a_checkpoint_holds_the_values_of_its_step_and_not_of_later_updates(tmp_path, disk):
    saver, weight = CheckpointSaver(tmp_path), torch.ones(4)
    saver.start_save(1, [full_shard("w", weight)], {})
    weight.add_(1.0)
    disk.set()
    assert load_value(saver.finish_save()).tolist() == [1.0] * 4
    saver.start_save(2, [full_shard("w", weight)], {})
    weight.add_(1.0)
    assert load_value(saver.finish_save()).tolist() == [2.0] * 4
    saver.close()


def test_the_checkpoint_before_stays_the_latest_until_the_save_is_finished(tmp_path, disk):
    disk.set()
    saver, weight = CheckpointSaver(tmp_path), torch.ones(4)
    saver.start_save(1, [full_shard("w", weight)], {})
    first = saver.finish_save()
    disk.clear()
    saver.start_save(2, [full_shard("w", weight + 1)], {})
    assert saver.is_saving and not saver.is_local_write_finished
    assert latest_checkpoint(tmp_path) == first and load_value(first).tolist() == [1.0] * 4
    disk.set()
    second = saver.finish_save()
    assert not saver.is_saving and saver.is_local_write_finished and saver.finish_save() is None
    assert latest_checkpoint(tmp_path) == second and load_value(second).tolist() == [2.0] * 4
    saver.close()


def test_one_save_is_in_flight_at_a_time(tmp_path, disk):
    saver = CheckpointSaver(tmp_path)
    saver.start_save(1, [full_shard("w", torch.ones(4))], {})
    with pytest.raises(RuntimeError, match="the checkpoint of step 1 is still in flight"):
        saver.start_save(2, [full_shard("w", torch.ones(4))], {})
    disk.set()
    saver.finish_save()
    saver.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_save_in_the_background_writes_the_files_of_one_in_the_foreground(tmp_path, size):
    def body(rank, exchange):
        shards = [
            full_shard(f"t{rank}", torch.arange(5.0) + rank),
            full_shard("all", torch.ones(2), is_saved_here=rank == 0),
        ]
        saver = CheckpointSaver(tmp_path / "background", exchange, rank)
        saver.start_save(1, shards, {"position": 3})
        saver.finish_save()
        saver.close()
        save_checkpoint(tmp_path / "foreground", 1, shards, {"position": 3}, exchange, rank)

    assert run_on_threads(size, body) == [None] * size
    files = read_files(tmp_path / "background")
    assert files == read_files(tmp_path / "foreground") and len(files) == size + 1


def test_a_failed_write_is_reported_on_all_ranks_and_the_next_save_works(tmp_path, monkeypatch):
    real = save.write_tensor_file

    def full_disk(file, tensors):
        if "step-00000002" in str(file) and file.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return real(file, tensors)

    monkeypatch.setattr(save, "write_tensor_file", full_disk)

    def body(rank, exchange):
        saver, messages = CheckpointSaver(tmp_path, exchange, rank), []
        for step in (1, 2, 3):
            saver.start_save(step, [full_shard(f"t{rank}", torch.ones(2))], {})
            try:
                saver.finish_save()
            except RunError as error:
                messages.append(str(error))
        saver.close()
        return messages

    first, second = run_on_threads(2, body)
    assert first == second and len(first) == 1
    assert "the checkpoint of step 2 was not written" in first[0] and "rank 1: [Errno 28]" in first[0]
    assert f"the last complete one is {tmp_path / 'step-00000001'}" in first[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_the_plan_travels_when_the_layout_changes_and_else_only_checksums_do(tmp_path):
    def body(rank, exchange):
        gathered = []

        def gather(value):
            gathered.append(value)
            return exchange(value) if rank == 0 else exchange(value) and []

        saver = CheckpointSaver(tmp_path, exchange, rank)
        saver.gather_object = gather
        shard, other = full_shard(f"t{rank}", torch.zeros(3)), full_shard(f"t{rank}", torch.ones(4))
        for step, shards in enumerate(
            [[shard], [shard], [other], [other, full_shard("all", torch.ones(2), rank == 1)]]
        ):
            gathered.clear()
            saver.start_save(step, shards, {})
            plans = len(gathered)
            path = saver.finish_save()
            index = read_index(path)
            assert {name: tensor.shape for name, tensor in index.tensors.items()} == {
                **{f"t{other}": (4 if step > 1 else 3,) for other in range(2)},
                **({"all": (2,)} if step == 3 else {}),
            }
            assert not verify_checkpoint(path)
            assert plans == (step != 1) and len(gathered) == plans + 1
            assert len(pickle.dumps(gathered[-1])) < 250
        saver.close()

    assert run_on_threads(2, body) == [None, None]


def test_a_layout_that_was_refused_is_not_taken_for_known(tmp_path):
    def body(rank, exchange):
        saver = CheckpointSaver(tmp_path, exchange, rank)
        for _ in range(2):
            with pytest.raises(RunError, match="w is written twice"):
                saver.start_save(1, [full_shard("w", torch.ones(4))], {})
        saver.close()

    assert run_on_threads(2, body) == [None, None]


def test_a_copy_that_fails_on_one_rank_is_reported_on_all(tmp_path, monkeypatch):
    real = CheckpointSaver._copy_to_host

    def copy(saver, tensors):
        if saver._rank == 1:
            raise RuntimeError("can't allocate memory")
        return real(saver, tensors)

    monkeypatch.setattr(CheckpointSaver, "_copy_to_host", copy)

    def body(rank, exchange):
        saver = CheckpointSaver(tmp_path, exchange, rank)
        saver.start_save(1, [full_shard(f"t{rank}", torch.ones(4))], {})
        with pytest.raises(RunError, match="rank 1: RuntimeError: can't allocate memory"):
            saver.finish_save()
        saver.close()

    assert run_on_threads(2, body) == [None, None] and not any(tmp_path.iterdir())


def test_rank_0_completes_a_checkpoint_without_the_others_once_all_files_are_written(tmp_path):
    def body(rank, exchange):
        saver = CheckpointSaver(tmp_path, exchange, rank)
        saver.writes_entries = True
        saver.start_save(1, [full_shard(f"t{rank}", torch.ones(2)), full_shard("all", torch.ones(2), rank == 0)], {})
        early = saver.commit_if_written() if rank == 1 else None  # never completes it
        saver._save.file.result()
        exchange(None)
        committed = saver.commit_if_written()
        assert committed == (tmp_path / "step-00000001" if rank == 0 else None)
        assert saver.commit_if_written() is None and saver.is_saving
        found = not (tmp_path / "step-00000001.partial").exists() if rank == 0 else True
        assert saver.finish_save() == tmp_path / "step-00000001" and not saver.is_saving
        saver.close()
        return early, found

    assert run_on_threads(2, body) == [(None, True)] * 2
    assert not verify_checkpoint(tmp_path / "step-00000001")
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        *("checkpoint.json", "rank-00000.safetensors", "rank-00001.safetensors"),
    ]


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_0_completes_no_checkpoint_of_which_a_file_is_missing(tmp_path, monkeypatch, missing):
    real = save.write_tensor_file

    def full_disk(file, tensors):
        if file.name == f"rank-{missing:05d}.safetensors":
            raise OSError(28, "No space left on device")
        return real(file, tensors)

    monkeypatch.setattr(save, "write_tensor_file", full_disk)

    def body(rank, exchange):
        saver = CheckpointSaver(tmp_path, exchange, rank)
        saver.writes_entries = True
        saver.start_save(1, [full_shard(f"t{rank}", torch.ones(2))], {})
        saver._save.file.exception()
        exchange(None)
        assert saver.commit_if_written() is None
        with pytest.raises(RunError, match=f"rank {missing}: .*No space left on device"):
            saver.finish_save()
        saver.close()

    assert run_on_threads(2, body) == [None, None]
    assert not list(tmp_path.iterdir())
