"""A save or load that fails on one rank fails on all with one message; nothing is lost or partly loaded."""

import math
import os
import resource
from pathlib import Path

import pytest
import torch

from minidist.checkpoint import folders, save, shards
from minidist.checkpoint import index as index_file
from minidist.checkpoint.folders import complete_checkpoints, latest_checkpoint
from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.save import CheckpointSaver, save_checkpoint
from minidist.checkpoint.shards import TensorShard, merge_plans
from minidist.errors import DamagedError, MisfitError, RunError, UserError
from minidist.parameters import Box
from tests.helpers.checkpoint_cases import (
    full_shard,
    load_full_tensors,
    make_targets,
    read_files,
    run_on_threads,
    save_sharded_rows,
)


def failing_save(root, size, pieces_of_rank, step=2, state=None):
    """The one message of a save that fails on all ranks."""
    outcomes = run_on_threads(
        size, lambda r, exchange: save_checkpoint(root, step, pieces_of_rank(r), state or {}, exchange, r)
    )
    assert {type(outcome) for outcome in outcomes} == {RunError}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.mark.parametrize("moment", ["write", "commit"])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_loses_nothing(tmp_path, monkeypatch, moment):
    save_sharded_rows(tmp_path, 1)
    before, real = read_files(tmp_path), save.write_tensor_file

    def write_tensor_file(file, tensors):
        entry = real(file, tensors)
        if file.name == "rank-00001.safetensors":
            file.write_bytes(file.read_bytes()[:50])
            raise OSError(28, "No space left on device")
        return entry

    def commit(root, step):
        raise OSError(30, "Read-only file system")

    if moment == "write":
        monkeypatch.setattr(save, "write_tensor_file", write_tensor_file)
    else:
        monkeypatch.setattr(folders, "commit_checkpoint", commit)
    message = failing_save(tmp_path, 3, lambda rank: [full_shard(f"t{rank}", torch.zeros(4))])
    assert ("rank 1: [Errno 28] No space left" if moment == "write" else "rank 0: [Errno 30] Read-only") in message
    assert ("writing 16 bytes" in message) == (moment == "write")
    assert str(tmp_path / "step-00000001") in message
    assert read_files(tmp_path) == before and os.listdir(tmp_path) == ["step-00000001"]


OPERATIONS = [(os, "mkdir"), (os, "pwrite"), (os, "fsync"), (os, "rename"), (Path, "write_text")]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_any_operation_of_a_save_keeps_the_checkpoint_before(tmp_path, monkeypatch, background):
    def save(root, step):
        saver = CheckpointSaver(root)
        saver.start_save(step, [full_shard("w", torch.full((8,), float(step)))], {}, copy=background)
        saver.finish_save()
        saver.close()

    def fail_at(moment):
        """Make operation number `moment` from now on fail; return the list of operations that began."""
        begun = []

        def failing(real, name):
            def operation(*arguments, **options):
                begun.append(name)
                if len(begun) == moment + 1:
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)

            return operation

        for module, name in OPERATIONS:
            monkeypatch.setattr(module, name, failing(getattr(module, name), name))
        return begun

    failed = []
    for moment in range(20):
        root = tmp_path / str(moment)
        save(root, 1)
        before = read_files(root)
        begun = fail_at(moment)
        try:
            save(root, 2)
        except RunError as error:
            failed.append(begun[moment])
            assert "No space left on device" in str(error) and "the last complete one is" in str(error)
        finally:
            monkeypatch.undo()
        found = complete_checkpoints(root)
        assert sorted(os.listdir(root)) == [path.name for path in found.values()] and 1 in found
        assert {name: data for name, data in read_files(root).items() if name in before} == before
        for step, path in found.items():
            load_full_tensors(path, tensors := {"w": torch.zeros(8)})
            assert tensors["w"].tolist() == [step] * 8
        if len(begun) <= moment:
            break
        save(root, 3)
        assert latest_checkpoint(root).name == "step-00000003"
    assert set(failed) == {name for _, name in OPERATIONS} and len(found) == 2


def test_a_limit_of_the_system_on_the_size_of_files_fails_a_save_and_loses_nothing(tmp_path):
    shards = [full_shard("t", torch.zeros(20))]
    save_checkpoint(tmp_path, 1, shards, {})
    before = read_files(tmp_path)
    sizes = sorted(map(len, before.values()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, sizes[0] - 1, sizes[0], sizes[1] - 1):  # the tensors' file, then the index, which is larger
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(RunError, match=r"File too large.*the last complete one is .*step-00000001"):
                save_checkpoint(tmp_path, 2, shards, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert read_files(tmp_path) == before and os.listdir(tmp_path) == ["step-00000001"]


def test_a_root_that_cannot_be_created_fails_the_save_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    message = failing_save(tmp_path / "file", 2, lambda rank: [full_shard(f"t{rank}", torch.zeros(1))])
    assert "rank 0" in message and "there is no earlier one" in message


def row_shard(start, stop, dtype=torch.float32, total=4):
    return TensorShard("params/w", (total, 2), Box((start, 0), (stop, 2)), torch.zeros(stop - start, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([row_shard(0, 2), row_shard(3, 4)], "params/w: 6 of 8 elements are written ([0:2,0:2], [3:4,0:2])"),
        (
            [row_shard(0, 3), row_shard(2, 4)],
            "params/w is written twice: [0:3,0:2] in rank-00000.safetensors and [2:4,0:2] in",
        ),
        (
            [full_shard("t", torch.tensor(1.0))] * 2,
            "t is written twice: [] in rank-00000.safetensors and [] in rank-00001",
        ),
        (
            [row_shard(0, 2), row_shard(2, 4, torch.float64)],
            "params/w is float32 of shape (4, 2) here and float64 (4, 2) there",
        ),
        (
            [row_shard(0, 4), row_shard(0, 4, total=5)],
            "params/w is float32 of shape (4, 2) here and float32 (5, 2) there",
        ),
    ],
)
def test_shards_that_do_not_cover_a_tensor_once_are_refused_before_writing(tmp_path, pieces, said):
    message = failing_save(tmp_path, 2, lambda rank: [pieces[rank]])
    assert said in message
    assert os.listdir(tmp_path) == []


def test_coverage_is_checked_for_boxes_that_no_straight_cut_separates():
    # A pinwheel: five rectangles that no straight cut separates; moving one edge makes a gap and an overlap.
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 3)), ((2, 1), (3, 3)), ((1, 0), (3, 1)), ((1, 1), (2, 2))]

    def merge(boxes):
        pieces = [TensorShard("w", (3, 3), Box(a, b), torch.zeros(Box(a, b).shape)) for a, b in boxes]
        return merge_plans([shards.plan_local_shards(pieces)], ["f"])

    assert {(saved.box.start, saved.box.stop) for saved in merge(wheel)["w"].boxes} == set(wheel)
    for missing in range(5):
        with pytest.raises(ValueError, match="of 9 elements"):
            merge(wheel[:missing] + wheel[missing + 1 :])
    with pytest.raises(ValueError, match="written twice"):
        merge([*wheel[:4], ((1, 1), (2, 3))])


def test_a_tensor_that_no_rank_writes_is_refused(tmp_path):
    assert "0 of 3 elements are written (no box)" in failing_save(
        tmp_path, 2, lambda rank: [full_shard("w", torch.zeros(3), is_saved_here=False)]
    )


def test_ranks_at_different_steps_do_not_save(tmp_path):
    outcomes = run_on_threads(
        2, lambda r, exchange: save_checkpoint(tmp_path, 5 + r, [full_shard("w", torch.zeros(1))], {}, exchange, r)
    )
    assert all("not at the same step: [5, 6]" in str(outcome) for outcome in outcomes)


def test_a_state_that_is_not_json_is_refused_on_all_ranks(tmp_path):
    message = failing_save(tmp_path, 2, lambda rank: [full_shard(f"t{rank}", torch.zeros(1))], state={"best": math.nan})
    assert "not JSON compliant" in message and os.listdir(tmp_path) == []


def damage_file(file, position=None, cut=None):
    data = bytearray(file.read_bytes())
    if position is not None:
        data[position] ^= 1
    file.write_bytes(data[:cut])


DAMAGE = {
    "a flipped bit of a weight": lambda p: damage_file(p / "rank-00001.safetensors", position=-1),
    "a flipped bit of a header": lambda p: damage_file(p / "rank-00001.safetensors", position=10),
    "a truncated file": lambda p: damage_file(p / "rank-00001.safetensors", cut=-7),
    "a missing file": lambda p: (p / "rank-00001.safetensors").unlink(),
    "an empty file": lambda p: damage_file(p / "rank-00001.safetensors", cut=0),
    "the file of another checkpoint": lambda p: (p / "rank-00001.safetensors").write_bytes(
        (p.with_name("step-00000003") / "rank-00001.safetensors").read_bytes()
    ),
    "a changed position in the index": lambda p: (p / "checkpoint.json").write_text(
        (p / "checkpoint.json").read_text().replace('"position":16', '"position":17')
    ),
    "a truncated index": lambda p: damage_file(p / "checkpoint.json", cut=-1),
    "a missing index": lambda p: (p / "checkpoint.json").unlink(),
    "an index of another program": lambda p: (p / "checkpoint.json").write_text('{"format": 9}'),
    "an index that is no index": lambda p: (p / "checkpoint.json").write_text("[1]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_the_intact_one_before_it_is_named(tmp_path, kind):
    save_sharded_rows(tmp_path, 1)
    path = save_sharded_rows(tmp_path, 2)
    save_sharded_rows(tmp_path, 3, value=5.0)
    DAMAGE[kind](path)
    before, tensors = read_files(tmp_path), [make_targets(), make_targets()]
    outcomes = run_on_threads(
        2,
        lambda rank, exchange: load_checkpoint(
            path, [full_shard(*item) for item in tensors[rank].items()], exchange, rank
        ),
    )
    assert {type(outcome) for outcome in outcomes} == {DamagedError}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    file = path / ("checkpoint.json" if "index" in kind else "rank-00001.safetensors")
    assert str(file) in str(outcomes[0])
    assert f"Resume from {tmp_path / 'step-00000001'} instead, which is intact." in str(outcomes[0])
    assert all((tensor == 77).all() for held in tensors for tensor in held.values())
    assert read_files(tmp_path) == before
    if "index" in kind:
        with pytest.raises(UserError, match="step-00000001 instead"):
            read_index(path)


def test_the_message_gives_expected_and_actual_size_and_checksum(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    file = path / "rank-00001.safetensors"
    size, expected = file.stat().st_size, read_index(path).files[file.name].checksum
    damage_file(file, position=-1)
    actual = index_file.FileEntry.from_file(file).checksum
    with pytest.raises(UserError, match=f"its checksum is {actual}, {expected} was written. No other checkpoint"):
        load_full_tensors(path, make_targets())
    damage_file(file, cut=-7)
    with pytest.raises(UserError, match=f"it has {size - 7} bytes, {size} were written"):
        load_full_tensors(path, make_targets())


def test_the_nearest_intact_checkpoint_before_a_damaged_one_is_offered(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save_sharded_rows(tmp_path, step)
    for step, offered in ((4, 3), (3, 2), (1, 2), (2, 5)):
        DAMAGE["a flipped bit of a weight"](tmp_path / f"step-0000000{step}")
        with pytest.raises(UserError, match=f"Resume from .*step-0000000{offered} instead"):
            load_full_tensors(tmp_path / f"step-0000000{step}", make_targets())


def test_a_missing_file_and_an_unknown_format_version_are_reported(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    DAMAGE["a missing file"](path)
    with pytest.raises(UserError, match=r"rank-00001.safetensors is missing \(\d+ bytes were written\)"):
        load_full_tensors(path, make_targets())
    DAMAGE["an index of another program"](path)
    with pytest.raises(UserError, match="has format 9; this version reads format 2"):
        load_full_tensors(path, make_targets())


def test_a_file_that_is_not_needed_is_not_read(tmp_path):
    path = run_on_threads(2, lambda r, e: save_checkpoint(tmp_path, 1, [full_shard(f"t{r}", torch.ones(2))], {}, e, r))[
        0
    ]
    DAMAGE["a flipped bit of a weight"](path)
    tensors = {"t0": torch.zeros(2)}
    load_full_tensors(path, tensors, prefix="t0")
    assert tensors["t0"].tolist() == [1, 1]


def make_mismatches():
    good = make_targets()
    return {
        "dtype": (
            {**good, "params/w": torch.full((4, 3), 77.0).double()},
            "params/w is float32 in the .*, float64 here",
        ),
        "shape": ({**good, "params/b": torch.full((3,), 77.0)}, r"params/b has shape \(2,\) in the .*, \(3,\) here"),
        "missing": ({**good, "params/c": torch.full((1,), 77.0)}, "params/c is not in the checkpoint"),
        "extra": ({"params/b": good["params/b"]}, "no place here for 1 of its tensors: params/w"),
    }


@pytest.mark.parametrize("kind", make_mismatches())
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path, kind):
    tensors, message = make_mismatches()[kind]
    with pytest.raises(UserError, match=message):
        load_full_tensors(save_sharded_rows(tmp_path, 1), tensors)
    assert all((tensor == 77).all() for tensor in tensors.values())


def test_a_mismatch_on_one_rank_fails_the_load_on_all(tmp_path):
    path, held = save_sharded_rows(tmp_path, 1), [make_targets(), {**make_targets(), "params/c": torch.zeros(1)}]
    outcomes = run_on_threads(
        2, lambda r, exchange: load_checkpoint(path, [full_shard(*item) for item in held[r].items()], exchange, r)
    )
    assert {type(outcome) for outcome in outcomes} == {MisfitError} and len({str(o) for o in outcomes}) == 1
    assert (held[0]["params/w"] == 77).all()


def test_loading_with_cast_changes_the_dtype(tmp_path):
    tensors = {name: tensor.double() for name, tensor in make_targets().items()}
    load_full_tensors(save_sharded_rows(tmp_path, 1, value=0.1), tensors, cast=True)
    assert tensors["params/b"].tolist() == [float(torch.tensor(-0.1))] * 2


def test_a_tensor_loaded_by_another_rank_is_not_extra(tmp_path):
    path = save_sharded_rows(tmp_path, 1)
    names = ["params/w", "params/b"]
    outcomes = run_on_threads(
        2, lambda r, exchange: load_checkpoint(path, [full_shard(names[r], make_targets()[names[r]])], exchange, r)
    )
    assert [outcome.step for outcome in outcomes] == [1, 1]


def test_a_prefix_loads_part_of_a_checkpoint(tmp_path):
    path = save_checkpoint(
        tmp_path, 1, [full_shard("params/w", torch.ones(2)), full_shard("adamw.exp_avg/w", torch.ones(2))], {}
    )
    tensors = {"params/w": torch.zeros(2)}
    load_full_tensors(path, tensors, prefix="params/")
    assert tensors["params/w"].tolist() == [1, 1]
    with pytest.raises(UserError, match="adamw.exp_avg/w"):
        load_full_tensors(path, tensors)
