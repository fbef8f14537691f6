"""Simple checkpoints: any layout loads what another has saved, the fast trainer included, and damage is found."""

import numpy as np
import pytest
import torch

from minidist.checkpoint.index import verify_checkpoint
from minidist.checkpoint.load import load_checkpoint
from minidist.checkpoint.save import save_checkpoint
from minidist.checkpoint.shards import make_tensor_shards
from minidist.comm import bind, bind_all_gather_object
from minidist.errors import DamagedError, UserError
from minidist.mesh import Mesh
from minidist.parameters import ParamSpec, flat_boxes
from minidist.simple import checkpoint
from minidist.simple.training_state import make_shards

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


def save_one(world, root):
    group = bind(world, Mesh())["control"]
    shards = [s for name, (spec, *_) in specs(0, 1).items() for s in make_shards("params", spec, values(name), 0)]
    return checkpoint.save(root, 1, shards, {}, group), shards, group


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "checkpoint.json"])
def test_one_changed_bit_is_found_and_nothing_is_loaded(tmp_path, file):
    from minidist.comm import World

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
    from minidist.comm import World

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
