"""Simple checkpoints: any layout loads what another has saved, the fast trainer included, and damage is found."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minidist.checkpoint.index import verify_checkpoint
from minidist.checkpoint.load import load_checkpoint
from minidist.checkpoint.save import save_checkpoint
from minidist.checkpoint.shards import make_tensor_shards
from minidist.comm import World, bind, bind_all_gather_object
from minidist.errors import DamagedError, RunError, UserError
from minidist.mesh import Mesh
from minidist.parameters import Box, ParamSpec, flat_boxes
from minidist.simple import checkpoint
from minidist.simple.training_state import make_shards
from tests.helpers.warm_python import warm_python

SHAPES = {"a.weight": (5, 6, 4), "b.weight": (7,), "c": ()}


def values(name: str) -> torch.Tensor:
    count = int(np.prod(SHAPES[name])) if SHAPES[name] else 1
    return torch.arange(count, dtype=torch.float32).view(SHAPES[name]) + len(name)


def specs(rank: int, size: int) -> dict[str, tuple[ParamSpec, int, int]]:
    """A flat range of every parameter per rank, as ZeRO shards them; of a scalar, a replica on every rank."""
    found = {}
    for name, shape in SHAPES.items():
        numel = values(name).numel()
        start, stop = (rank * numel // size, (rank + 1) * numel // size) if shape else (0, 1)
        replicas = (rank,) if shape else tuple(range(size))
        found[name] = ParamSpec(name, shape, tuple(flat_boxes(shape, start, stop)), replicas), start, stop
    return found


def save_and_load(world, root, saver):
    """Save with one engine from this layout, and load with both into the layout of one rank with everything."""
    group = bind(world, Mesh(dp=world.size))["control"]
    kinds = {
        name: (spec, values(name).flatten()[start:stop].clone())
        for name, (spec, start, stop) in specs(world.rank, world.size).items()
    }
    gather = bind_all_gather_object(group)
    if saver == "simple":
        shards = [s for spec, part in kinds.values() for s in make_shards("params", spec, part, world.rank)]
        path = checkpoint.save(root, 7, shards, {"answer": 42}, group)
    else:
        shards = [s for spec, part in kinds.values() for s in make_tensor_shards("params", spec, part, world.rank)]
        path = save_checkpoint(root, 7, shards, {"answer": 42}, gather, world.rank)
    whole = {
        name: ParamSpec(name, shape, tuple(flat_boxes(shape, 0, values(name).numel())), tuple(range(world.size)))
        for name, shape in SHAPES.items()
    }
    by_simple = {name: torch.zeros(values(name).numel()) for name in SHAPES}
    by_fast = {name: torch.zeros(values(name).numel()) for name in SHAPES}
    found = checkpoint.load(
        path, [s for name in SHAPES for s in make_shards("params", whole[name], by_simple[name], 0)], group
    )
    load_checkpoint(
        path,
        [s for name in SHAPES for s in make_tensor_shards("params", whole[name], by_fast[name], 0)],
        gather,
        world.rank,
    )
    return str(path), found["state"], found["step"], by_simple, by_fast


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("saver", ["simple", "fast"])
def test_each_engine_loads_what_the_other_has_saved(ranks, tmp_path, saver, num_ranks):
    for path, state, step, by_simple, by_fast in ranks(save_and_load, num_ranks, tmp_path, saver):
        assert path.endswith("step-00000007") and state == {"answer": 42} and step == 7
        assert verify_checkpoint(checkpoint.Path(path)) == []
        for name in SHAPES:
            assert torch.equal(by_simple[name].view(SHAPES[name]), values(name))
            assert torch.equal(by_fast[name].view(SHAPES[name]), values(name))


# -- from one number of ranks to another ------------------------------------------------------------------------------

TENSORS = {
    "params/matrix": torch.arange(35.0).reshape(7, 5),
    "params/vector": torch.arange(11.0, dtype=torch.float64),
    "optimizer.step/vector": torch.tensor(3.0),
}


def cut(rank, size, axis, fill=None):
    """Shards of unequal length, cut along the first or the last axis; a scalar is saved by rank 0."""
    shards = []
    for name, tensor in TENSORS.items():
        start, stop = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim():
            bounds = [round(tensor.shape[axis] * (i / size) ** 1.5) for i in range(size + 1)]
            start[axis], stop[axis] = bounds[rank], bounds[rank + 1]
        box = Box(tuple(start), tuple(stop))
        part = tensor[box.slices].clone() if fill is None else torch.full(box.shape, fill, dtype=tensor.dtype)
        shards.append(checkpoint.Shard(name, tuple(tensor.shape), box, part, bool(tensor.dim()) or rank == 0))
    return shards


def save_rows(world, root, step=7):
    group = bind(world, Mesh(dp=world.size))["control"]
    return checkpoint.save(root, step, cut(world.rank, world.size, axis=0), {"rank": world.rank}, group)


def load_columns(world, path):
    shards = cut(world.rank, world.size, axis=-1, fill=-1.0)
    index = checkpoint.load(path, shards, bind(world, Mesh(dp=world.size))["control"])
    expected = cut(world.rank, world.size, axis=-1)
    return index["state"], all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, expected, strict=True))


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_any_layout_loads_what_another_has_saved(ranks, tmp_path, writers, readers):
    [path, *_] = ranks(save_rows, writers, tmp_path)
    assert ranks(load_columns, readers, path) == [({"rank": 0}, True)] * readers


def load_damaged(world, path):
    shards = cut(world.rank, world.size, axis=0, fill=-1.0)
    with pytest.raises(DamagedError) as caught:
        checkpoint.load(path, shards, bind(world, Mesh(dp=world.size))["control"])
    assert all((shard.tensor == -1).all() for shard in shards), "a tensor was written"
    return str(caught.value)


@pytest.mark.parametrize("file", ["checkpoint.json", "rank-00001.safetensors"])
def test_damage_that_one_rank_reads_stops_all_before_a_tensor_is_written(ranks, tmp_path, file):
    [path, *_] = ranks(save_rows, 2, tmp_path)
    data = bytearray((path / file).read_bytes())
    data[-2] ^= 1
    (path / file).write_bytes(data)
    messages = ranks(load_damaged, 3, path)
    assert len(set(messages)) == 1 and file in messages[0]


# -- saves that do not succeed ----------------------------------------------------------------------------------------


def save_to_full_disk(world, root, file):
    def sync(path, sync=checkpoint.sync):
        if path.name == file:
            raise OSError("no space left on the disk")
        sync(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "sync", sync)
        with pytest.raises(RunError, match="no space left"):
            save_rows(world, root, step=8)


@pytest.mark.parametrize("file", ["rank-00002.safetensors", "checkpoint.json"])
def test_no_rank_saves_if_one_cannot(ranks, tmp_path, file):
    [path, *_] = ranks(save_rows, 2, tmp_path)
    ranks(save_to_full_disk, 3, tmp_path, file)
    assert checkpoint.complete_checkpoints(tmp_path) == [path]


def test_a_process_killed_at_any_moment_of_a_save_leaves_the_previous_or_the_new_checkpoint(tmp_path):
    command = [sys.executable, "-m", "tests.helpers.checkpoint_killed", tmp_path, "simple"]
    result = warm_python.run(command, cwd=Path(__file__).resolve().parents[2], timeout=100)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    assert sorted(results) == ["new step", "same step"]
    for name, found in results.items():
        values = [outcome["latest"] for outcome in found]
        assert set(values) == {10, 20} and values == sorted(values), (name, found)
        assert len(values) > 8, "mkdir, two files and three more operations of fsync make at least eight moments"


# -- what is refused --------------------------------------------------------------------------------------------------


def save_one(world, root):
    group = bind(world, Mesh())["control"]
    shards = [s for name, (spec, *_) in specs(0, 1).items() for s in make_shards("params", spec, values(name), 0)]
    return checkpoint.save(root, 1, shards, {}, group), shards, group


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "checkpoint.json"])
def test_one_changed_bit_is_found_and_nothing_is_loaded(tmp_path, file):
    path, shards, group = save_one(World.single(), tmp_path)
    data = bytearray((path / file).read_bytes())
    # In the index the number of the step, so that it stays readable: 1 becomes 0.
    data[data.index(b'"step": ') + 8 if file == "checkpoint.json" else len(data) // 2] ^= 1
    (path / file).write_bytes(data)
    for shard in shards:
        shard.tensor.fill_(-1)
    with pytest.raises(DamagedError):
        checkpoint.load(path, shards, group)
    assert all((shard.tensor == -1).all() for shard in shards)


def test_another_shape_is_refused_with_both(tmp_path):
    path, _, group = save_one(World.single(), tmp_path)
    spec = ParamSpec("b.weight", (8,), tuple(flat_boxes((8,), 0, 8)), (0,))
    with pytest.raises(UserError, match=r"'shape': \[7\].*'shape': \[8\]"):
        checkpoint.load(path, make_shards("params", spec, torch.zeros(8), 0), group)


def test_an_unfinished_checkpoint_does_not_count_and_old_ones_are_pruned(tmp_path):
    for step in (1, 2, 10):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00000011.partial").mkdir()
    assert [path.name[-2:] for path in checkpoint.complete_checkpoints(tmp_path)] == ["01", "02", "10"]
    checkpoint.prune(tmp_path / "step-00000010", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]


def test_the_checkpoint_just_saved_is_never_pruned(tmp_path):
    """After a resume from step 5, as steps 10 and 15 were damaged, the next save is of an earlier step than theirs."""
    for step in (5, 7, 10, 15):
        (tmp_path / f"step-{step:08d}").mkdir()
    checkpoint.prune(tmp_path / "step-00000007", 2)
    assert [path.name[-2:] for path in checkpoint.complete_checkpoints(tmp_path)] == ["07", "10", "15"]


@pytest.mark.parametrize("text", ["[1]", '"text"', "7", "null", "{}"])
def test_an_index_that_is_no_index_is_damage(tmp_path, text):
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(DamagedError, match="checkpoint.json cannot be read"):
        checkpoint.read_index(tmp_path)
