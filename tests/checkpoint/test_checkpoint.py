"""Checkpoints saved in one layout load bit for bit in any other; their files on disk."""

import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.checkpoint import index as index_file
from minidist.checkpoint.folders import latest_checkpoint
from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.save import save_checkpoint
from minidist.checkpoint.shards import DTYPES, TensorShard, make_tensor_shards
from minidist.parameters import Box, ParamSpec, flat_boxes
from tests.helpers.checkpoint_cases import (
    bytes_of,
    full_shard,
    load_full_tensors,
    make_targets,
    run_on_threads,
    save_sharded_rows,
)


@st.composite
def global_tensors(draw):
    """Up to three tensors of any dtype with random bits (bool: random truth), 0-dim and empty ones among them."""
    tensors = {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        count = math.prod(shape) * dtype.itemsize
        random = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[f"t{number}"] = random.view(dtype).view(shape)
    return tensors


@st.composite
def draw_layout(draw, tensors):
    """A layout of 1 to 4 ranks: name -> (boxes of each rank, replicated?)."""
    size, layout = draw(st.integers(1, 4)), {}
    for name, tensor in tensors.items():
        shape, numel = tuple(tensor.shape), tensor.numel()
        kind = draw(st.sampled_from(["replicated", "flat"] + ["rectangles"] * bool(shape)))
        if kind == "replicated":
            layout[name] = [[Box.whole(shape)]] * size, True
            continue
        axis = draw(st.integers(0, len(shape) - 1)) if kind == "rectangles" else None
        length = numel if axis is None else shape[axis]
        inner = draw(st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1))
        edges = [0, *sorted(inner), length]
        boxes = []
        for start, stop in zip(edges, edges[1:], strict=False):
            if axis is None:
                boxes.append(flat_boxes(shape, start, stop))
            else:
                low, high = [0] * len(shape), list(shape)
                low[axis], high[axis] = start, stop
                boxes.append([Box(tuple(low), tuple(high))])
        layout[name] = boxes, False
    return size, layout


def make_shards(tensors, layout, rank, size, fill):
    """The shards of one rank: copies of the tensors, or zeros to be filled."""
    pieces = []
    for number, (name, tensor) in enumerate(tensors.items()):
        boxes, replicated = layout[name]
        for box in boxes[rank]:
            held = tensor[box.slices].clone() if fill else torch.zeros(box.shape, dtype=tensor.dtype)
            pieces.append(TensorShard(name, tuple(tensor.shape), box, held, not replicated or number % size == rank))
        if not boxes[rank] and not tensor.numel():
            nothing = Box.whole(tuple(tensor.shape))
            pieces.append(TensorShard(name, nothing.shape, nothing, torch.empty(nothing.shape, dtype=tensor.dtype)))
    return pieces


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layout_loads_any_layouts_checkpoint_bit_for_bit(data):
    tensors = data.draw(global_tensors())
    writers, before = data.draw(draw_layout(tensors))
    readers, after = data.draw(draw_layout(tensors))
    root = Path(tempfile.mkdtemp())
    try:

        def write(rank, exchange):
            return save_checkpoint(
                root, 3, make_shards(tensors, before, rank, writers, True), {"a": [1]}, exchange, rank
            )

        def read(rank, exchange):
            pieces = make_shards(tensors, after, rank, readers, False)
            return load_checkpoint(latest_checkpoint(root), pieces, exchange, rank), pieces

        assert run_on_threads(writers, write) == [root / "step-00000003"] * writers
        for loaded, pieces in run_on_threads(readers, read):
            assert (loaded.step, loaded.state) == (3, {"a": [1]})
            for piece in pieces:
                assert bytes_of(piece.tensor) == bytes_of(tensors[piece.name][piece.box.slices]), piece.name
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_round_trips_with_empty_and_zero_dimensional_tensors(tmp_path, dtype):
    byte_values = torch.arange(256).to(torch.uint8)  # as floats, among them NaNs with a payload and both infinities
    vector = (byte_values % 2 if dtype == "bool" else byte_values).view(DTYPES[dtype])
    saved = {"vector": vector, "scalar": vector[1].clone(), "empty": vector[:0].view(0, 4)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_full_tensors(save_checkpoint(tmp_path, 1, [full_shard(*item) for item in saved.items()], {}), loaded)
    assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == {n: bytes_of(t) for n, t in saved.items()}


def test_a_flat_shard_is_saved_from_and_loaded_into_views_of_its_buffer(tmp_path):
    tensor = torch.arange(35.0).view(5, 7)
    for rank, (start, stop) in enumerate([(0, 17), (17, 35)]):
        spec = ParamSpec("w", (5, 7), tuple(flat_boxes((5, 7), start, stop)), (rank,))
        pieces = make_tensor_shards("params", spec, tensor.view(-1)[start:stop], rank)
        assert [piece.box for piece in pieces] == list(spec.boxes) and all(piece.is_saved_here for piece in pieces)
        assert all(bytes_of(piece.tensor) == bytes_of(tensor[piece.box.slices]) for piece in pieces)
        if rank == 0:
            first = pieces
        else:
            path = save_checkpoint(tmp_path, 1, first + pieces, {})
    buffer = torch.zeros(18)
    load_checkpoint(path, make_tensor_shards("params", spec, buffer, 1))
    assert buffer.tolist() == list(range(17, 35))


def test_a_replica_that_does_not_own_a_parameter_does_not_write_it():
    spec = ParamSpec("w", (2,), (Box((0,), (2,)),), replicas=(1, 3))
    assert [make_tensor_shards("params", spec, torch.zeros(2), rank)[0].is_saved_here for rank in (1, 3)] == [
        True,
        False,
    ]


def test_a_parameter_that_requires_a_gradient_is_filled_in_place(tmp_path):
    path = save_checkpoint(tmp_path, 1, [full_shard("w", torch.nn.Parameter(torch.arange(3.0)))], {})
    parameter = torch.nn.Parameter(torch.zeros(3))
    memory = parameter.data_ptr()
    load_full_tensors(path, {"w": parameter})
    assert parameter.tolist() == [0, 1, 2] and parameter.data_ptr() == memory and parameter.requires_grad


def test_a_checkpoint_is_safetensors_and_json_with_a_checksum_for_every_file(tmp_path):
    path = save_sharded_rows(tmp_path, 12)
    assert [file.name for file in sorted(path.iterdir())] == [
        "checkpoint.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    text = json.loads((path / "checkpoint.json").read_text())
    assert list(text) == ["format", "sha256", "step", "state", "checksum", "files", "partitions", "tensors"]
    w = text["tensors"]["params/w"]
    assert w == {"dtype": "float32", "shape": [4, 3], "partition": w["partition"]}
    assert text["partitions"][w["partition"]] == [[0, 0, 6], [1, 6, 12]]  # file, and flat range
    assert all(len(entry["checksum"]) == 64 for entry in text["files"].values())


def test_a_rank_with_nothing_to_write_makes_no_file(tmp_path):
    pieces = [
        [full_shard("w", torch.zeros(2))],
        [full_shard("w", torch.zeros(2), is_saved_here=False), full_shard("e", torch.zeros(0))],
    ]
    path = run_on_threads(2, lambda rank, exchange: save_checkpoint(tmp_path, 1, pieces[rank], {}, exchange, rank))[0]
    assert sorted(os.listdir(path)) == ["checkpoint.json", "rank-00000.safetensors"]


def test_checkpoint_files_have_default_permissions(tmp_path):
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in save_sharded_rows(tmp_path, 1).iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_the_training_state_round_trips_as_json(tmp_path):
    state = {"position": 800, "loss": 0.1 + 0.2, "betas": (0.9, 0.95), "shares": {2: "b", 10: "a"}, "text": "ä\n"}
    path = save_checkpoint(tmp_path, 1, [full_shard("w", torch.zeros(1))], state)
    assert read_index(path).state == json.loads(json.dumps(state))


def test_files_are_synced_before_the_rename_and_the_rename_before_save_returns(tmp_path, monkeypatch):
    synced, before_rename, real = [], [], (os.fsync, os.rename)

    def fsync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real[0](descriptor)

    def rename(source, target):
        before_rename.append([path.stat().st_ino for path in (*Path(source).iterdir(), Path(source))])
        before_rename.append(len(synced))
        real[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_sharded_rows(tmp_path, 1)
    (inodes, count) = before_rename
    assert len(inodes) == 4 and set(inodes) <= set(synced[:count])
    assert synced[count:] == [tmp_path.stat().st_ino]


def test_each_file_is_hashed_once_over_all_ranks_of_a_load(tmp_path, monkeypatch):
    path, hashed, real = save_sharded_rows(tmp_path, 1), [], index_file.FileEntry.from_file
    monkeypatch.setattr(index_file.FileEntry, "from_file", lambda file: hashed.append(file.name) or real(file))
    run_on_threads(
        3,
        lambda rank, exchange: load_checkpoint(path, [full_shard(*i) for i in make_targets().items()], exchange, rank),
    )
    assert sorted(hashed) == ["rank-00000.safetensors", "rank-00001.safetensors"]
