"""Shards of global tensors: those a rank holds, those a checkpoint holds, and their overlaps.

Both are boxes of named global tensors, so loading does not depend on the layout that saved. PyTorch's
torch.distributed.checkpoint does the same (its metadata lists chunks with offsets and sizes).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from minidist.parameters import Box, ParamSpec, flat_boxes

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class TensorShard:
    """The part of a global tensor that this rank holds: one box (a range in every dimension) and its values.

    name: kind and global name, like "params/model.norm.weight" or "optimizer.exp_avg/model.norm.weight".
    shape: the shape of the global tensor.
    box: where in the global tensor the values belong.
    tensor: the values, in the shape of the box; may be a view, for example of a flat buffer. Loading fills it in place.
    is_saved_here: whether this rank saves the box; exactly one of the ranks that hold the same box does.
    Raises ValueError if box, shape and tensor do not match, or the dtype cannot be saved.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    is_saved_here: bool = True

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        box = self.box
        tensor_shape = tuple(self.tensor.shape)
        if len(box.stop) != len(self.shape) or any(b > n for b, n in zip(box.stop, self.shape, strict=True)):
            raise ValueError(f"{self.name}: box {format_box(box)} is not inside a tensor of shape {self.shape}")
        if tensor_shape != box.shape:
            raise ValueError(f"{self.name}: box {format_box(box)} has shape {box.shape}, its tensor {tensor_shape}")
        if self.tensor.dtype not in _NAMES:
            raise ValueError(f"{self.name}: dtype {self.tensor.dtype} cannot be saved; these can: {', '.join(DTYPES)}")

    @property
    def dtype_name(self) -> str:
        """The name of the tensor's dtype, a key of DTYPES: "float32"."""
        return _NAMES[self.tensor.dtype]


@dataclass(frozen=True)
class SavedBox:
    """A box (index range) of a tensor, saved in the safetensors file `file` under the key `name + format_box(box)`."""

    box: Box
    file: str


@dataclass(frozen=True)
class SavedPart:
    """A part of a tensor, saved in the safetensors file `file`: the box (index range) from `start` to `stop`.

    If `start` and `stop` are numbers, the part is a flat range: the row-major elements start <= i < stop, saved as the
    boxes of `flat_boxes`. A flat shard of ZeRO is such a range: two numbers, instead of up to 2 d - 1 boxes.
    """

    start: int | tuple[int, ...]
    stop: int | tuple[int, ...]
    file: str

    def boxes(self, shape: tuple[int, ...]) -> list[SavedBox]:
        """Return the boxes of this part of a tensor whose full shape is `shape`."""
        flat = isinstance(self.start, int)
        boxes = flat_boxes(shape, self.start, self.stop) if flat else [Box(self.start, self.stop)]
        return [SavedBox(box, self.file) for box in boxes]


@dataclass(frozen=True)
class SavedTensor:
    """Where a checkpoint stores a global tensor.

    dtype_name: a key of DTYPES. parts: the files and boxes that together hold every element exactly once.
    """

    dtype_name: str
    shape: tuple[int, ...]
    parts: tuple[SavedPart, ...]

    @property
    def boxes(self) -> list[SavedBox]:
        """The boxes (index ranges), with their files, that together hold every element exactly once."""
        return [box for part in self.parts for box in part.boxes(self.shape)]


def make_tensor_shards(kind: str, spec: ParamSpec, tensor: Tensor, rank: int) -> list[TensorShard]:
    """Return the `TensorShard`s of a parameter, or of a tensor that is sharded like it, such as an optimizer state.

    kind: prefix of the name, as "params" or "optimizer.exp_avg". spec: the parameter's; its boxes are the index ranges
    of the elements that this rank holds. tensor: these elements, in the shape of the only box, or flat and contiguous,
    one box after another. rank: this rank's global rank; it saves the shards if it is the spec's owner.
    """
    name = f"{kind}/{spec.name}"
    is_saved_here = spec.owner == rank
    if len(spec.boxes) == 1 and tuple(tensor.shape) == spec.boxes[0].shape:
        return [TensorShard(name, spec.shape, spec.boxes[0], tensor, is_saved_here)]
    if tensor.numel() != spec.numel:
        raise ValueError(f"{name}: the tensor holds {tensor.numel()} elements, the boxes of its spec {spec.numel}")
    flat = tensor.detach().view(-1)
    local_shards = []
    start = 0
    for box in spec.boxes:
        part = flat[start : start + box.numel].view(box.shape)
        local_shards.append(TensorShard(name, spec.shape, box, part, is_saved_here))
        start += box.numel
    return local_shards


def format_box(box: Box) -> str:
    """Format a box like an index expression: `[0:4,8:16]`."""
    return "[" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def shard_key(shard: TensorShard) -> str:
    """Return the key of a shard in its safetensors file: the name and box of the shard."""
    return shard.name + format_box(shard.box)


def shards_to_save(local_shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """Yield the non-empty shards with `is_saved_here`, which this rank saves."""
    return (shard for shard in local_shards if shard.is_saved_here and shard.box.numel)


# What a rank sends to rank 0 about its shards: entries (parameter, shape, kinds, parts), which are plain tuples because
# there are many. kinds: (prefix, dtype name) of the tensors of this parameter that are sharded the same way, as
# ("params/", "float32"). parts: what this rank saves of each of them: (start, stop), two numbers for a range, two
# tuples for a box.
Plan = list[tuple[str, tuple[int, ...], tuple[tuple[str, str], ...], tuple[tuple, ...]]]


def plan_local_shards(local_shards: Iterable[TensorShard]) -> Plan:
    """Describe, for `merge_plans`, the global tensors of this rank's shards and the parts of them that this rank saves.

    A parameter and its optimizer states, which are sharded the same way, share an entry (see `Plan`).
    """
    tensors: dict[str, tuple[str, tuple[int, ...], list[Box]]] = {}
    for shard in local_shards:
        dtype_name, shape, boxes = tensors.setdefault(shard.name, (shard.dtype_name, shard.shape, []))
        if (dtype_name, shape) != (shard.dtype_name, shard.shape):
            raise _mismatch_error(shard.name, (dtype_name, shape), (shard.dtype_name, shard.shape))
        boxes += [shard.box] if shard.is_saved_here and shard.box.numel else []
    kinds: dict[tuple, list[tuple[str, str]]] = {}
    for name, (dtype_name, shape, boxes) in tensors.items():
        prefix = name[: name.find("/") + 1]
        key = name.removeprefix(prefix), shape, _merge_into_parts(shape, boxes)
        kinds.setdefault(key, []).append((prefix, dtype_name))
    return [(parameter, shape, tuple(found), parts) for (parameter, shape, parts), found in kinds.items()]


def merge_plans(plans: Sequence[Plan], files: Sequence[str]) -> dict[str, SavedTensor]:
    """Merge the plans of all ranks (`plan_local_shards`); return where each tensor of the checkpoint is saved, by name.

    files: the name of each rank's file. Raises ValueError unless exactly one rank saves each element, and all ranks
    agree on shapes and dtypes.
    """
    merged: dict[tuple, list[SavedPart]] = {}
    for plan, file in zip(plans, files, strict=True):
        for parameter, shape, kinds, parts in plan:
            merged.setdefault((parameter, shape, kinds), []).extend(SavedPart(*limits, file) for limits in parts)
    tensors: dict[str, SavedTensor] = {}
    for (parameter, shape, kinds), found in merged.items():
        parts = tuple(found)
        for prefix, dtype_name in kinds:
            tensor = SavedTensor(dtype_name, shape, parts)
            if (known := tensors.setdefault(prefix + parameter, tensor)) is not tensor:
                if (known.dtype_name, known.shape) != (dtype_name, shape):
                    raise _mismatch_error(prefix + parameter, (known.dtype_name, known.shape), (dtype_name, shape))
                tensors[prefix + parameter] = SavedTensor(dtype_name, shape, known.parts + parts)
    for name, tensor in tensors.items():
        check_covered(name, tensor)
    return tensors


def find_overlaps(shard: TensorShard, tensor: SavedTensor) -> list[tuple[SavedBox, Box]]:
    """Return (saved box, its intersection with the shard) for each saved box of `tensor` that overlaps the shard."""
    if not shard.box.numel:
        return []
    first = _flat_index(tensor.shape, shard.box.start)
    last = _flat_index(tensor.shape, tuple(stop - 1 for stop in shard.box.stop))
    near = (part for part in tensor.parts if isinstance(part.start, tuple) or part.start <= last and part.stop > first)
    overlaps = ((saved, saved.box.intersect(shard.box)) for part in near for saved in part.boxes(tensor.shape))
    return [(saved, box) for saved, box in overlaps if box is not None]


def plan_reads(
    tensors: Mapping[str, SavedTensor], local_shards: Iterable[TensorShard], cast: bool = False
) -> tuple[dict[str, list[tuple[TensorShard, SavedBox, Box]]], list[str]]:
    """Return what a rank must read to fill its shards, {file: [(shard, saved box, intersection)]}, and all mismatches.

    tensors: the saved tensors, by name. cast: allow saved tensors of another dtype. Each mismatch is a line of text.
    """
    reads: dict[str, list[tuple[TensorShard, SavedBox, Box]]] = {}
    problems = []
    for shard in local_shards:
        saved = tensors.get(shard.name)
        if saved is None:
            problems.append(f"{shard.name} is not in the checkpoint")
        elif saved.shape != shard.shape:
            problems.append(f"{shard.name} has shape {saved.shape} in the checkpoint, {shard.shape} here")
        elif saved.dtype_name != shard.dtype_name and not cast:
            problems.append(f"{shard.name} is {saved.dtype_name} in the checkpoint, {shard.dtype_name} here")
        else:
            overlaps = find_overlaps(shard, saved)
            if sum(box.numel for _, box in overlaps) != shard.box.numel:
                problems.append(f"{shard_key(shard)} is not wholly in the checkpoint")
            for source, box in overlaps:
                reads.setdefault(source.file, []).append((shard, source, box))
    return reads, problems


def check_covered(name: str, tensor: SavedTensor) -> None:
    """Raise ValueError unless each element of a tensor is in exactly one part. name: the tensor's, for the message."""
    if all(isinstance(part.start, int) for part in tensor.parts):
        ranges = sorted(tensor.parts, key=lambda part: part.start)
        bounds = [0, *(limit for part in ranges for limit in (part.start, part.stop)), math.prod(tensor.shape)]
        if bounds[::2] == bounds[1::2]:
            return  # each begins where the one before ends; else the boxes say what is wrong
    open_boxes: list[SavedBox] = []
    boxes = tensor.boxes
    for saved in sorted(boxes, key=lambda saved: saved.box.start):
        box = saved.box
        # The boxes are sorted by start, so only those that end after this one's first index can overlap it.
        open_boxes = [other for other in open_boxes if not box.start or other.box.stop[0] > box.start[0]]
        for other in open_boxes:
            if other.box.intersect(box) is not None:
                raise ValueError(
                    f"{name} is written twice: "
                    f"{format_box(other.box)} in {other.file} and {format_box(box)} in {saved.file}"
                )
        open_boxes.append(saved)
    count = sum(saved.box.numel for saved in boxes)
    total = Box.whole(tensor.shape).numel
    if count < total:
        given = ", ".join(format_box(saved.box) for saved in boxes[:4]) or "no box"
        more = f" and {len(boxes) - 4} more" if len(boxes) > 4 else ""
        raise ValueError(f"{name}: {count} of {total} elements are written ({given}{more})")


def _mismatch_error(name: str, here: tuple, there: tuple) -> ValueError:
    """Return the error that a tensor has two different (dtype name, shape)."""
    return ValueError(f"{name} is {here[0]} of shape {here[1]} here and {there[0]} {there[1]} there")


def _merge_into_parts(shape: tuple[int, ...], boxes: list[Box]) -> tuple[tuple, ...]:
    """Return boxes as (start, stop): a single flat range if `flat_boxes` gives these boxes; otherwise one per box."""
    if not boxes:
        return ()
    # Boxes of a range follow one another, so the first and the last give its limits.
    start, stop = _flat_index(shape, boxes[0].start), _flat_index(shape, tuple(i - 1 for i in boxes[-1].stop)) + 1
    if start < stop and flat_boxes(shape, start, stop) == boxes:
        return ((start, stop),)
    if len(boxes) == 1:
        return ((boxes[0].start, boxes[0].stop),)
    return tuple(part for box in boxes for part in _merge_into_parts(shape, [box]))


def _flat_index(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Return the row-major position of an element."""
    return reduce(lambda flat, at: flat * at[0] + at[1], zip(shape, index, strict=True), 0)
