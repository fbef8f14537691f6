"""Tests of resharding_load: the test writes checkpoints itself, and knows each element of every global tensor."""

import contextlib
import json
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from exercises.recorded_disk import INDEX, checkpoint_files
from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object
from minidist.errors import DamagedError, UserError
from minidist.parameters import Box
from minidist.simple.checkpoint import Shard

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
        shards.append(Shard(name, tuple(tensor.shape), box, empty, is_saved_here))
    return shards


@contextlib.contextmanager
def saved(files):
    """A folder with these files, of this rank alone, so that it can be deleted at any time."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / FOLDER).mkdir()
        for name, data in files.items():
            (Path(root) / name).write_bytes(data)
        yield Path(root) / FOLDER


def files_of(layout, spoil=None):
    """The files of a checkpoint. spoil: the end of the names of those in which one bit is wrong."""
    files = checkpoint_files(FOLDER, TENSORS, layouts()[layout], STATE)
    for name in files:
        if spoil and name.endswith(spoil):
            files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    return files


def expect_filled(shards, case):
    for shard in shards:
        wanted = TENSORS[shard.name][shard.box.slices]
        expect(
            f"{shard.name}, elements {shard.box.start} to {shard.box.stop}", shard.tensor.detach(), wanted, case=case
        )


def expect_refused(answer, network, files, shards, kind, case):
    """Loading must raise `kind` on this rank, and leave every tensor full of -5; returns the error."""
    with saved(files) as folder:
        return expect_folder_refused(answer, network, folder, shards, kind, case)


def expect_folder_refused(answer, network, folder, shards, kind, case):
    try:
        answer.load(folder, shards, network.group)
    except UserError as error:
        if isinstance(error, DamagedError) != (kind is DamagedError):
            raise Wrong("wrong", "the error of load", kind.__name__, type(error).__name__, case=case) from None
        for shard in shards:
            if not (shard.tensor == -5).all():
                raise Wrong(
                    "wrong", f"{shard.name} must not change on any rank", "-5 everywhere", "", case=case
                ) from None
        return error
    raise Wrong("wrong", f"load must raise {kind.__name__} on all ranks", kind.__name__, "it returned", case=case)


@test(points=6, ranks=(1, 2, 3, 4))
def any_layout_into_any_other(answer, world, network):
    """Each saved layout is loaded into boxes that cut the tensors elsewhere; the state is returned."""
    for layout in layouts():
        for along_last in (True, False):
            shards = shards_of(world.rank, world.size, along_last=along_last)
            with saved(files_of(layout)) as folder:
                index = answer.load(folder, shards, network.group)
            case = f"saved by {layout}; loaded by {world.size} along the {'last' if along_last else 'first'} axis"
            expect_filled(shards, case)
            expect("the state in the index", index["state"], STATE, case=case)
            written = json.loads(files_of(layout)[f"{FOLDER}/{INDEX}"])
            for key in ("files", "tensors"):
                expect(f'"{key}" in the index', index.get(key), written[key], case=case)


@test(points=2, ranks=(1, 2))
def fills_the_given_memory(answer, world, network):
    """Tensors are filled in place: a parameter, and a view that is not contiguous, whose neighbours stay."""
    flat = torch.full((7, 9), -5.0)
    parameter = nn.Parameter(torch.zeros(11, dtype=torch.float64))
    memory = parameter.detach()
    shards = [
        Shard("params/w", (7, 5), Box((1, 2), (6, 5)), flat[1:6, 3:6], True),
        Shard("params/b", (11,), Box((0,), (11,)), parameter, True),
    ]
    with saved(files_of("3 ranks, along the first axis")) as folder:
        answer.load(folder, shards, network.group)
    expect_filled(shards, "a parameter, and columns 3 to 6 of a larger tensor")
    expect("the parameter's own memory", memory, TENSORS["params/b"])
    case = "a shard whose tensor is a view of a larger one"
    expect("that part of the larger tensor", flat[1:6, 3:6], TENSORS["params/w"][1:6, 2:5], case=case)
    flat[1:6, 3:6] = -5
    expect("the memory around the view", flat, torch.full((7, 9), -5.0))
    tensors = {name: torch.full_like(tensor, -5) for name, tensor in TENSORS.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    shards = [Shard(n, shapes[n], Box((0,) * len(shapes[n]), shapes[n]), t, True) for n, t in tensors.items()]
    memories = {name: tensor.detach() for name, tensor in tensors.items()}
    with saved(files_of("1 ranks, along the first axis")) as folder:
        answer.load(folder, shards, network.group)
    for name, tensor in TENSORS.items():
        case = "a checkpoint whose boxes are those of the shards"
        expect(f"the memory that {name} had before", memories[name], tensor, case=case)


@test(points=3, ranks=(2, 3))
def reads_what_it_needs(answer, world, network):
    """A rank reads no file that holds none of its elements."""
    row = 6 if world.rank == 0 else 0
    places = (0, 5), (0, 2), (2, 5)
    shards = [
        Shard("params/w", (7, 5), Box((row, a), (row + 1, b)), torch.full((1, b - a), -5.0), True) for a, b in places
    ]
    first = 8 if world.rank == 0 else 0  # of two elements that are in the file of this row, too
    own = torch.full((2,), -5.0, dtype=torch.float64)
    shards.append(Shard("params/b", (11,), Box((first,), (first + 2,)), own, True))
    shards.append(Shard("params/w", (7, 5), Box((3, 0), (3, 5)), torch.empty(0, 5), True))
    files = files_of("3 ranks, along the first axis")
    files[f"{FOLDER}/rank-00001.safetensors"] = b"not a file of tensors"
    case = (
        f"shards in row {row} of 7, and one without elements; three ranks have saved rows, and the file of rank 1, "
        "rows 2 and 3, is damaged"
    )
    with saved(files) as folder:
        try:
            answer.load(folder, shards, network.group)
        except UserError as error:
            raise Wrong("wrong", "load must not read that file", "no error", str(error)[:80], case=case) from None
    expect_filled(shards, case)
    if world.size == 2:
        read = files_read(answer, network, shards)
        wanted = ["rank-00002.safetensors" if world.rank == 0 else "rank-00000.safetensors"]
        expect("the files of tensors that are read", read, wanted, case="four shards of two tensors, all in one file")


def files_read(answer, network, shards):
    """Return the names of the files of tensors that are read in one load, in order."""
    read, original = [], Path.read_bytes

    def read_bytes(path):
        read.append(path.name)
        return original(path)

    files = files_of("3 ranks, along the first axis")
    with saved(files) as folder, mock.patch.object(Path, "read_bytes", read_bytes):
        answer.load(folder, shards, network.group)
    return [name for name in read if name.endswith(".safetensors")]


@test(points=5, ranks=(1, 2, 3))
def damage_touches_no_tensor(answer, world, network):
    """A flipped bit in any file, needed by one rank only, is found by all, before any tensor changes."""
    for spoil in (INDEX, "rank-00000.safetensors", "rank-00002.safetensors"):
        shards = shards_of(world.rank, world.size, along_last=False)
        files, case = files_of("3 ranks, along the first axis", spoil), f"{spoil} has a wrong byte"
        error = expect_refused(answer, network, files, shards, DamagedError, case)
        expect("whether the error names the file", spoil in str(error), True, case=case)
    files = files_of("3 ranks, along the first axis")
    del files[f"{FOLDER}/rank-00001.safetensors"]
    shards, case = shards_of(world.rank, world.size), "rank-00001.safetensors is missing"
    error = expect_refused(answer, network, files, shards, DamagedError, case)
    expect("whether the error names the file", "rank-00001.safetensors" in str(error), True, case=case)
    layout, file = "3 ranks, along the first axis", "rank-00001.safetensors"
    with saved(files_of(layout)) as folder:
        answer.load(folder, shards_of(world.rank, world.size), network.group)
        (folder / file).write_bytes(files_of(layout, file)[f"{FOLDER}/{file}"])
        shards, case = shards_of(world.rank, world.size), f"{file} has been loaded before, and has a wrong byte now"
        expect_folder_refused(answer, network, folder, shards, DamagedError, case)


@test(points=4, ranks=(2,))
def what_does_not_fit_is_refused(answer, world, network):
    """A tensor of another shape or dtype, one that was not saved, and missing elements: all ranks raise, none loads."""
    wrong = {
        "another shape": Shard("params/b", (12,), Box((0,), (5,)), torch.full((5,), -5.0).double(), True),
        "the transposed shape": Shard("params/w", (5, 7), Box((0, 0), (2, 5)), torch.full((2, 5), -5.0), True),
        "another dtype": Shard("params/b", (11,), Box((0,), (5,)), torch.full((5,), -5.0), True),
        "another dtype of 8 bytes": Shard("params/b", (11,), Box((0,), (5,)), torch.full((5,), -5), True),
        "a tensor that was not saved, of which this rank has no element": Shard(
            "params/d", (11,), Box((5,), (5,)), torch.empty(0), True
        ),
        "another dtype, of no element": Shard("params/b", (11,), Box((5,), (5,)), torch.empty(0), True),
        "a tensor that was not saved": Shard("params/c", (11,), Box((0,), (5,)), torch.full((5,), -5.0), True),
    }
    for case, shard in wrong.items():
        shards = shards_of(world.rank, world.size) + ([shard] if world.rank == 1 else [])
        files, case = files_of("2 ranks, along the first axis"), f"rank 1: {case}"
        error = expect_refused(answer, network, files, shards, UserError, case)
        expect("whether the error names the tensor", shard.name in str(error), True, case=case)
    column = Box((0, world.rank), (7, world.rank + 1))
    one_column = [Shard("params/w", (7, 5), column, torch.full((7, 1), -5.0), True)]
    for name, elements, shards in (
        ("params/b", "the elements 3 to 7", shards_of(world.rank, world.size)),
        ("params/w", "the rows 2 and 3, of which each rank has one column,", one_column),
        ("optimizer.step/w", "the only element", shards_of(world.rank, world.size)),
    ):
        boxes = layouts()["3 ranks, along the first axis"]
        boxes[name] = [box for box in boxes[name] if box[0] != 1 and box[1]]
        files, case = checkpoint_files(FOLDER, TENSORS, boxes, STATE), f"{elements} of {name} were not saved"
        error = expect_refused(answer, network, files, shards, DamagedError, case)
        expect("whether the error names the tensor", name in str(error), True, case=case)


@test(points=2, ranks=(3,))
def a_rank_may_need_nothing(answer, world, network):
    """A rank without shards takes part, and returns the state."""
    shards = shards_of(world.rank, world.size) if world.rank == 1 else []
    with saved(files_of("2 ranks, along the first axis")) as folder:
        index = answer.load(folder, shards, network.group)
    expect("the state in the index", index["state"], STATE)
    if world.rank == 1:
        expect_filled(shards, "rank 1 alone has shards")
