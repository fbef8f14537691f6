"""Tests of resharding_load: the test writes checkpoints itself, and knows each element of every global tensor."""

import torch
from torch import nn

from exercises.recorded_disk import RecordedDisk, checkpoint_files
from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object
from minidist.fault.agree import ErrorOnAnyRank
from minidist.fault.shards import TensorShard
from minidist.parameters import Box

FOLDER = "step-00000007"
TENSORS = {
    "params/w": torch.arange(35.0).reshape(7, 5) + 1,
    "params/b": torch.arange(11.0, dtype=torch.float64) / 3 + 1,
    "optimizer.step/w": torch.tensor(7.0),
    "buffers/mask": torch.arange(24).reshape(2, 3, 4),
}
STATE = {"step": 7, "seed": 3}


def parts(shape, size, axis, bend=1.0):
    """Boxes that cut one axis into `size` parts, of equal lengths or, bent, of growing ones; some may be empty."""
    if not shape:
        return [(0, (), ())]
    cuts = [int(shape[axis] * (i / size) ** bend) for i in range(size + 1)]
    cuts[-1] = shape[axis]
    boxes = []
    for rank in range(size):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = cuts[rank], cuts[rank + 1]
        boxes.append((rank, tuple(start), tuple(stop)))
    return boxes


def blocks(shape):
    """Boxes of four ranks that cut the first and the last axis in two."""
    if len(shape) < 2:
        return parts(shape, 4, 0)
    found = []
    for rank in range(4):
        start, stop = [0] * len(shape), list(shape)
        for axis, half in ((0, rank // 2), (len(shape) - 1, rank % 2)):
            middle = shape[axis] // 2 + 1 if shape[axis] > 2 else 1
            start[axis], stop[axis] = (0, middle) if half == 0 else (middle, shape[axis])
        found.append((rank, tuple(start), tuple(stop)))
    return found


def layouts():
    """The boxes of each tensor, by the name of the layout that saved it."""
    found = {"4 ranks, in blocks": {name: blocks(tensor.shape) for name, tensor in TENSORS.items()}}
    for size in (1, 2, 3):
        found[f"{size} ranks, along the first axis"] = {n: parts(t.shape, size, 0) for n, t in TENSORS.items()}
    found["3 ranks, along the last axis"] = {n: parts(t.shape, 3, len(t.shape) - 1) for n, t in TENSORS.items()}
    for boxes in found.values():
        for name in boxes:
            boxes[name] = [box for box in boxes[name] if all(b > a for a, b in zip(*box[1:], strict=True))]
    return found


def shards_of(rank, size, fill=None, along_last=True):
    """This rank's shards, full of -5, in parts that grow with the rank; all hold the scalar, rank 0 saves it."""
    shards = []
    for name, tensor in TENSORS.items():
        boxes = parts(tensor.shape, size, len(tensor.shape) - 1 if along_last else 0, bend=1.7)
        _, start, stop = boxes[rank if tensor.dim() else 0]
        box = Box(start, stop)
        is_saved_here = rank == 0 or tensor.dim() > 0
        empty = torch.full(box.shape, -5, dtype=tensor.dtype)
        shards.append(TensorShard(name, tuple(tensor.shape), box, empty, is_saved_here))
    return shards


def disk_with(layout, spoil=None):
    files = checkpoint_files(FOLDER, TENSORS, layouts()[layout], STATE)
    for name in files:
        if spoil and name.endswith(spoil):
            files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    return RecordedDisk(files)


def expect_filled(shards, case):
    for shard in shards:
        wanted = TENSORS[shard.name][shard.box.slices]
        expect(
            f"{shard.name}, elements {shard.box.start} to {shard.box.stop}", shard.tensor.detach(), wanted, case=case
        )


def expect_refused(answer, network, disk, shards, case):
    """Loading must raise ErrorOnAnyRank on this rank, and leave every tensor full of -5; returns the error."""
    try:
        answer.load(disk, FOLDER, shards, network.group)
    except ErrorOnAnyRank as error:
        for shard in shards:
            if not (shard.tensor == -5).all():
                raise Wrong(
                    "wrong", f"{shard.name} must not change on any rank", "-5 everywhere", "", case=case
                ) from None
        return error
    raise Wrong("wrong", "load must raise ErrorOnAnyRank on all ranks", "ErrorOnAnyRank", "it returned", case=case)


@test(points=6, ranks=(1, 2, 3, 4))
def any_layout_into_any_other(answer, world, network):
    """Each saved layout is loaded into boxes that cut the tensors elsewhere; the state is returned."""
    for layout in layouts():
        for along_last in (True, False):
            shards = shards_of(world.rank, world.size, along_last=along_last)
            state = answer.load(disk_with(layout), FOLDER, shards, network.group)
            case = f"saved by {layout}; loaded by {world.size} along the {'last' if along_last else 'first'} axis"
            expect_filled(shards, case)
            expect("the state", state, STATE, case=case)


@test(points=2, ranks=(1, 2))
def fills_the_given_memory(answer, world, network):
    """Tensors are filled in place: a parameter, and a view that is not contiguous, whose neighbours stay."""
    flat = torch.full((7, 9), -5.0)
    parameter = nn.Parameter(torch.zeros(11, dtype=torch.float64))
    memory = parameter.detach()
    shards = [
        TensorShard("params/w", (7, 5), Box((1, 2), (6, 5)), flat[1:6, 3:6]),
        TensorShard("params/b", (11,), Box((0,), (11,)), parameter),
    ]
    answer.load(disk_with("3 ranks, along the first axis"), FOLDER, shards, network.group)
    expect_filled(shards, "a parameter, and columns 3 to 6 of a larger tensor")
    expect("the parameter's own memory", memory, TENSORS["params/b"])
    case = "a shard whose tensor is a view of a larger one"
    expect("that part of the larger tensor", flat[1:6, 3:6], TENSORS["params/w"][1:6, 2:5], case=case)
    flat[1:6, 3:6] = -5
    expect("the memory around the view", flat, torch.full((7, 9), -5.0))


@test(points=3, ranks=(2, 3))
def reads_what_it_needs(answer, world, network):
    """A rank reads no file that holds none of its elements."""
    disk = disk_with("3 ranks, along the first axis")
    row = 6 if world.rank == 0 else 0
    shard = TensorShard("params/w", (7, 5), Box((row, 0), (row + 1, 5)), torch.full((1, 5), -5.0))
    halves = [
        TensorShard("params/w", (7, 5), Box((row, a), (row + 1, b)), torch.full((1, b - a), -5.0))
        for a, b in ((0, 2), (2, 5))
    ]
    answer.load(disk, FOLDER, [shard, *halves], network.group)
    file = f"{FOLDER}/rank-0000{2 if row else 0}.safetensors"
    read = sorted({name for name in disk.reads if name.endswith(".safetensors")})
    expect("the files that are read", read, [file], case=f"three shards in row {row} of 7; three ranks have saved rows")


@test(points=5, ranks=(1, 2, 3))
def damage_touches_no_tensor(answer, world, network):
    """A flipped bit in any file, needed by one rank only, is found by all, before any tensor changes."""
    for spoil in ("index.json", "rank-00000.safetensors", "rank-00002.safetensors"):
        shards = shards_of(world.rank, world.size, along_last=False)
        disk = disk_with("3 ranks, along the first axis", spoil)
        error = expect_refused(answer, network, disk, shards, f"{spoil} has a flipped bit")
        found = all_gather_object(error.found_damage, network.group)
        expect("found_damage of the error on each rank", found, [True] * world.size, case=f"{spoil} has a flipped bit")
    disk = disk_with("3 ranks, along the first axis")
    del disk.files[f"{FOLDER}/rank-00001.safetensors"]
    expect_refused(answer, network, disk, shards_of(world.rank, world.size), "rank-00001.safetensors is missing")


@test(points=4, ranks=(2,))
def what_does_not_fit_is_refused(answer, world, network):
    """A tensor of another shape or dtype, one that was not saved, and missing elements: all ranks raise, none loads."""
    wrong = {
        "another shape": TensorShard("params/b", (12,), Box((0,), (5,)), torch.full((5,), -5.0).double()),
        "the transposed shape": TensorShard("params/w", (5, 7), Box((0, 0), (2, 5)), torch.full((2, 5), -5.0)),
        "another dtype": TensorShard("params/b", (11,), Box((0,), (5,)), torch.full((5,), -5.0)),
        "a tensor that was not saved": TensorShard("params/c", (11,), Box((0,), (5,)), torch.full((5,), -5.0)),
    }
    for case, shard in wrong.items():
        shards = shards_of(world.rank, world.size) + ([shard] if world.rank == 1 else [])
        error = expect_refused(answer, network, disk_with("2 ranks, along the first axis"), shards, f"rank 1: {case}")
        expect("found_damage of the error", error.found_damage, False, case=case)
        expect("whether the error names the tensor", shard.name in str(error), True, case=case)
    boxes = layouts()["3 ranks, along the first axis"]
    boxes["params/b"] = [box for box in boxes["params/b"] if box[0] != 1]
    disk = RecordedDisk(checkpoint_files(FOLDER, TENSORS, boxes, STATE))
    shards = shards_of(world.rank, world.size)
    error = expect_refused(answer, network, disk, shards, "the elements 3 to 7 of params/b were not saved")
    expect("whether the error names the tensor", "params/b" in str(error), True, case="missing elements of params/b")


@test(points=2, ranks=(3,))
def a_rank_may_need_nothing(answer, world, network):
    """A rank without shards takes part, and returns the state."""
    shards = shards_of(world.rank, world.size) if world.rank == 1 else []
    state = answer.load(disk_with("2 ranks, along the first axis"), FOLDER, shards, network.group)
    expect("the state", state, STATE)
    if world.rank == 1:
        expect_filled(shards, "rank 1 alone has shards")
