"""Which parts of tensors the index lists, against an array in which every rank writes its elements."""

import json

import numpy as np
import pytest
import torch

from minidist.checkpoint.index import INDEX_NAME, format_tensors
from minidist.checkpoint.load import load_checkpoint
from minidist.checkpoint.save import save_checkpoint
from minidist.checkpoint.shards import TensorShard, find_overlaps, merge_plans, plan_local_shards
from minidist.parameters import Box, flat_boxes
from tests.helpers.checkpoint_cases import full_shard, load_full_tensors, run_on_threads

SHAPES = [(), (7,), (1, 5), (5, 1), (4, 6), (3, 1, 5), (2, 3, 4)]


def flat_shards(name, shape, start, stop):
    """The boxes of a flat range, each filled with its row-major positions."""
    values = torch.arange(float(np.prod(shape))).view(shape)
    return [TensorShard(name, shape, box, values[box.slices].clone()) for box in flat_boxes(shape, start, stop)]


def cut(total, size):
    """`size` ranges that cover `total` elements, some of them empty, as ZeRO cuts a flat parameter."""
    length = -(-total // size)
    return [(min(total, rank * length), min(total, rank * length + length)) for rank in range(size)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_flat_shard_is_one_range_and_loads_into_any_other(tmp_path, shape, size):
    total = int(np.prod(shape))

    def save(rank, exchange):
        shards = flat_shards("params/w", shape, *cut(total, size)[rank])
        return save_checkpoint(tmp_path, 1, shards or [], {}, exchange, rank)

    path = run_on_threads(size, save)[0]
    parts = json.loads((path / INDEX_NAME).read_text())["partitions"]
    assert parts == [[[n, *bounds] for n, bounds in enumerate(b for b in cut(total, size) if b[0] < b[1])]]
    whole = torch.full(shape, -1.0)
    load_full_tensors(path, {"params/w": whole})
    assert whole.flatten().tolist() == list(range(total))
    for start, stop in cut(total, 5):
        expected = flat_shards("params/w", shape, start, stop)
        loaded = flat_shards("params/w", shape, start, stop)
        for shard in loaded:
            shard.tensor.fill_(-1.0)
        load_checkpoint(path, [*loaded, full_shard("params/w", torch.zeros(shape))])
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(loaded, expected, strict=True))


def test_boxes_that_are_no_range_stay_boxes_and_give_the_same_overlaps():
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape = tuple(rng.integers(1, 6, size=rng.integers(1, 4)))
        shape = tuple(map(int, shape))
        axis = int(rng.integers(len(shape)))
        middle = int(rng.integers(shape[axis] + 1))
        first = Box((0,) * len(shape), tuple(middle if d == axis else n for d, n in enumerate(shape)))
        second = Box(tuple(middle if d == axis else 0 for d in range(len(shape))), shape)
        plans = [plan_local_shards([TensorShard("w", shape, box, torch.zeros(box.shape))]) for box in (first, second)]
        tensor = merge_plans(plans, ["a", "b"])["w"]
        assert {(saved.file, saved.box) for saved in tensor.boxes} == {
            (file, box) for file, box in (("a", first), ("b", second)) if box.numel
        }
        low = [int(rng.integers(n + 1)) for n in shape]
        box = Box(tuple(low), tuple(int(rng.integers(a, n + 1)) for a, n in zip(low, shape, strict=True)))
        owners = np.full(shape, -1)
        for saved, overlap in find_overlaps(TensorShard("w", shape, box, torch.zeros(box.shape)), tensor):
            assert (owners[overlap.slices] == -1).all()
            owners[overlap.slices] = "ab".index(saved.file)
        expected, target = np.full(shape, -1), np.zeros(shape, dtype=bool)
        target[box.slices] = True
        expected[first.slices], expected[second.slices] = 0, 1
        assert (owners == np.where(target, expected, -1)).all()


def test_tensors_divided_alike_share_a_partition_also_over_layers():
    def plan(rank):
        shards = []
        for layer in range(3):
            for kind in ("params", "optimizer.exp_avg"):
                shards += flat_shards(f"{kind}/layers.{layer}.w", (4, 6), *cut(24, 2)[rank])
        return plan_local_shards([*shards, *flat_shards("params/last", (5,), *cut(5, 2)[rank])])

    tensors = merge_plans([plan(0), plan(1)], ["a", "b"])
    assert all(isinstance(part.start, int) for tensor in tensors.values() for part in tensor.parts)
    entries = format_tensors(tensors)
    assert entries["partitions"] == [((0, 0, 12), (1, 12, 24)), ((0, 0, 3), (1, 3, 5))]
    assert len(entries["tensors"]) == 7


def test_an_optimizer_state_that_only_some_ranks_have_is_merged_with_that_of_the_others():
    with_state = [*flat_shards("params/w", (4,), 0, 2), *flat_shards("optimizer.m/w", (4,), 0, 2)]
    other = [*flat_shards("optimizer.m/w", (4,), 2, 4), *flat_shards("params/w", (4,), 2, 4)]
    other.append(full_shard("params/b", torch.zeros(2)))
    tensors = merge_plans([plan_local_shards(with_state), plan_local_shards(other)], ["a", "b"])
    assert {name: len(tensor.parts) for name, tensor in tensors.items()} == {
        "params/w": 2, "optimizer.m/w": 2, "params/b": 1
    }  # fmt: skip
