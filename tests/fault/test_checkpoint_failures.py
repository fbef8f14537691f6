"""A save or load that fails on one rank fails on all, with one message, and nothing is lost or half loaded."""

import math
import os

import pytest
import torch

from minidist.errors import RunError, UserError
from minidist.fault import checkpoint, folders, shards
from minidist.fault import index as index_file
from minidist.fault.checkpoint import load_checkpoint, read_index, save_checkpoint
from minidist.fault.shards import TensorShard, merge_descriptions
from minidist.parameters import Box
from tests.helpers.checkpoint_cases import contents, load_all, on_ranks, save_rows, targets, whole


def failing_save(root, size, pieces_of_rank, step=2, state=None):
    """The one message of a save that fails on all ranks."""
    outcomes = on_ranks(
        size, lambda r, exchange: save_checkpoint(root, step, pieces_of_rank(r), state or {}, exchange, r)
    )
    assert {type(outcome) for outcome in outcomes} == {RunError}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.mark.parametrize("moment", ["write", "commit"])
def test_a_full_disk_on_one_rank_fails_all_ranks_alike_and_loses_nothing(tmp_path, monkeypatch, moment):
    save_rows(tmp_path, 1)
    before, real = contents(tmp_path), checkpoint.save_file

    def save_file(tensors, file):
        real(tensors, file)
        if file.name == "rank-00001.safetensors":
            file.write_bytes(file.read_bytes()[:50])
            raise OSError(28, "No space left on device")

    def commit(root, step):
        raise OSError(30, "Read-only file system")

    if moment == "write":
        monkeypatch.setattr(checkpoint, "save_file", save_file)
    else:
        monkeypatch.setattr(folders, "commit_checkpoint", commit)
    message = failing_save(tmp_path, 3, lambda rank: [whole(f"t{rank}", torch.zeros(4))])
    assert ("rank 1: [Errno 28] No space left" if moment == "write" else "rank 0: [Errno 30] Read-only") in message
    assert ("writing 16 bytes" in message) == (moment == "write")
    assert str(tmp_path / "step-00000001") in message
    assert contents(tmp_path) == before and os.listdir(tmp_path) == ["step-00000001"]


def test_a_root_that_cannot_be_made_fails_all_ranks_alike(tmp_path):
    (tmp_path / "file").touch()
    message = failing_save(tmp_path / "file", 2, lambda rank: [whole(f"t{rank}", torch.zeros(1))])
    assert "rank 0" in message and "there is no earlier one" in message


def rows(start, stop, dtype=torch.float32, total=4):
    return TensorShard("params/w", (total, 2), Box((start, 0), (stop, 2)), torch.zeros(stop - start, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([rows(0, 2), rows(3, 4)], "params/w: 6 of 8 elements are written ([0:2,0:2], [3:4,0:2])"),
        ([rows(0, 3), rows(2, 4)], "params/w is written twice: [0:3,0:2] in rank-00000.safetensors and [2:4,0:2] in"),
        ([whole("t", torch.tensor(1.0))] * 2, "t is written twice: [] in rank-00000.safetensors and [] in rank-00001"),
        ([rows(0, 2), rows(2, 4, torch.float64)], "params/w is float32 of shape (4, 2) here and float64 (4, 2) there"),
        ([rows(0, 4), rows(0, 4, total=5)], "params/w is float32 of shape (4, 2) here and float32 (5, 2) there"),
    ],
)
def test_pieces_that_do_not_make_whole_tensors_are_refused_before_anything_is_written(tmp_path, pieces, said):
    message = failing_save(tmp_path, 2, lambda rank: [pieces[rank]])
    assert said in message
    assert os.listdir(tmp_path) == []


def test_every_element_is_asked_for_whichever_way_boxes_are_cut():
    # A pinwheel: five rectangles that no straight cut separates; moving one edge makes a gap and an overlap.
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 3)), ((2, 1), (3, 3)), ((1, 0), (3, 1)), ((1, 1), (2, 2))]

    def description(boxes):
        pieces = [TensorShard("w", (3, 3), Box(a, b), torch.zeros(Box(a, b).shape)) for a, b in boxes]
        return [shards.describe_shards(pieces, "f")]

    assert len(merge_descriptions(description(wheel))["w"].boxes) == 5
    for missing in range(5):
        with pytest.raises(ValueError, match="of 9 elements"):
            merge_descriptions(description(wheel[:missing] + wheel[missing + 1 :]))
    with pytest.raises(ValueError, match="written twice"):
        merge_descriptions(description([*wheel[:4], ((1, 1), (2, 3))]))


def test_a_tensor_that_no_rank_writes_is_refused(tmp_path):
    assert "0 of 3 elements are written (no box)" in failing_save(
        tmp_path, 2, lambda rank: [whole("w", torch.zeros(3), writes=False)]
    )


def test_ranks_at_different_steps_do_not_save(tmp_path):
    outcomes = on_ranks(
        2, lambda r, exchange: save_checkpoint(tmp_path, 5 + r, [whole("w", torch.zeros(1))], {}, exchange, r)
    )
    assert all("not at the same step: [5, 6]" in str(outcome) for outcome in outcomes)


def test_a_state_that_is_not_json_is_refused_on_all_ranks(tmp_path):
    message = failing_save(tmp_path, 2, lambda rank: [whole(f"t{rank}", torch.zeros(1))], state={"best": math.nan})
    assert "not JSON compliant" in message and os.listdir(tmp_path) == []


def change(file, position=None, cut=None):
    data = bytearray(file.read_bytes())
    if position is not None:
        data[position] ^= 1
    file.write_bytes(data[:cut])


DAMAGE = {
    "a flipped bit of a weight": lambda p: change(p / "rank-00001.safetensors", position=-1),
    "a flipped bit of a header": lambda p: change(p / "rank-00001.safetensors", position=10),
    "a truncated file": lambda p: change(p / "rank-00001.safetensors", cut=-7),
    "a missing file": lambda p: (p / "rank-00001.safetensors").unlink(),
    "a changed position in the index": lambda p: (p / "checkpoint.json").write_text(
        (p / "checkpoint.json").read_text().replace('"position": 16', '"position": 17')
    ),
    "a truncated index": lambda p: change(p / "checkpoint.json", cut=-1),
    "a missing index": lambda p: (p / "checkpoint.json").unlink(),
    "an index of another program": lambda p: (p / "checkpoint.json").write_text('{"format": 9}'),
    "an index that is no index": lambda p: (p / "checkpoint.json").write_text("[1]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_the_intact_one_before_it_is_named(tmp_path, kind):
    save_rows(tmp_path, 1)
    path = save_rows(tmp_path, 2)
    DAMAGE[kind](path)
    before, tensors = contents(tmp_path), [targets(), targets()]
    outcomes = on_ranks(
        2,
        lambda rank, exchange: load_checkpoint(path, [whole(*item) for item in tensors[rank].items()], exchange, rank),
    )
    assert {type(outcome) for outcome in outcomes} == {UserError}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    file = path / ("checkpoint.json" if "index" in kind else "rank-00001.safetensors")
    assert str(file) in str(outcomes[0])
    assert f"Resume from {tmp_path / 'step-00000001'} instead, which is intact." in str(outcomes[0])
    assert all((tensor == 77).all() for held in tensors for tensor in held.values())
    assert contents(tmp_path) == before
    if "index" in kind:
        with pytest.raises(UserError, match="step-00000001 instead"):
            read_index(path)


def test_the_message_gives_expected_and_actual_size_and_sha256(tmp_path):
    path = save_rows(tmp_path, 1)
    file = path / "rank-00001.safetensors"
    size, expected = file.stat().st_size, read_index(path).files[file.name].sha256
    change(file, position=-1)
    actual = index_file.FileEntry.of(file).sha256
    with pytest.raises(UserError, match=f"its sha256 is {actual}, {expected} was written. No other checkpoint"):
        load_all(path, targets())
    change(file, cut=-7)
    with pytest.raises(UserError, match=f"it has {size - 7} bytes, {size} were written"):
        load_all(path, targets())


def test_the_nearest_intact_checkpoint_before_a_damaged_one_is_offered(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save_rows(tmp_path, step)
    for step, offered in ((4, 3), (3, 2), (1, 2), (2, 5)):
        DAMAGE["a flipped bit of a weight"](tmp_path / f"step-0000000{step}")
        with pytest.raises(UserError, match=f"Resume from .*step-0000000{offered} instead"):
            load_all(tmp_path / f"step-0000000{step}", targets())


def test_a_missing_file_and_another_format_are_called_so(tmp_path):
    path = save_rows(tmp_path, 1)
    DAMAGE["a missing file"](path)
    with pytest.raises(UserError, match=r"rank-00001.safetensors is missing \(\d+ bytes were written\)"):
        load_all(path, targets())
    DAMAGE["an index of another program"](path)
    with pytest.raises(UserError, match="has format 9; this version reads format 1"):
        load_all(path, targets())


def test_a_file_that_is_not_needed_is_not_read(tmp_path):
    path = on_ranks(2, lambda r, e: save_checkpoint(tmp_path, 1, [whole(f"t{r}", torch.ones(2))], {}, e, r))[0]
    DAMAGE["a flipped bit of a weight"](path)
    tensors = {"t0": torch.zeros(2)}
    load_all(path, tensors, prefix="t0")
    assert tensors["t0"].tolist() == [1, 1]


def misfits():
    good = targets()
    return {
        "dtype": (
            {**good, "params/w": torch.full((4, 3), 77.0).double()},
            "params/w is float32 in the .*, float64 here",
        ),
        "shape": ({**good, "params/b": torch.full((3,), 77.0)}, r"params/b has shape \(2,\) in the .*, \(3,\) here"),
        "missing": ({**good, "params/c": torch.full((1,), 77.0)}, "params/c is not in the checkpoint"),
        "extra": ({"params/b": good["params/b"]}, "no place here for 1 of its tensors: params/w"),
    }


@pytest.mark.parametrize("kind", misfits())
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path, kind):
    tensors, said = misfits()[kind]
    with pytest.raises(UserError, match=said):
        load_all(save_rows(tmp_path, 1), tensors)
    assert all((tensor == 77).all() for tensor in tensors.values())


def test_what_does_not_fit_one_rank_fails_all_ranks_alike(tmp_path):
    path, held = save_rows(tmp_path, 1), [targets(), {**targets(), "params/c": torch.zeros(1)}]
    outcomes = on_ranks(
        2, lambda r, exchange: load_checkpoint(path, [whole(*item) for item in held[r].items()], exchange, r)
    )
    assert {type(outcome) for outcome in outcomes} == {UserError} and len({str(o) for o in outcomes}) == 1
    assert (held[0]["params/w"] == 77).all()


def test_a_dtype_changes_only_when_asked(tmp_path):
    tensors = {name: tensor.double() for name, tensor in targets().items()}
    load_all(save_rows(tmp_path, 1, value=0.1), tensors, cast=True)
    assert tensors["params/b"].tolist() == [float(torch.tensor(-0.1))] * 2


def test_a_tensor_that_another_rank_wants_is_not_extra(tmp_path):
    path = save_rows(tmp_path, 1)
    names = ["params/w", "params/b"]
    outcomes = on_ranks(
        2, lambda r, exchange: load_checkpoint(path, [whole(names[r], targets()[names[r]])], exchange, r)
    )
    assert [outcome.step for outcome in outcomes] == [1, 1]


def test_a_prefix_loads_part_of_a_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, 1, [whole("params/w", torch.ones(2)), whole("adamw.exp_avg/w", torch.ones(2))], {})
    tensors = {"params/w": torch.zeros(2)}
    load_all(path, tensors, prefix="params/")
    assert tensors["params/w"].tolist() == [1, 1]
    with pytest.raises(UserError, match="adamw.exp_avg/w"):
        load_all(path, tensors)
