"""Shards of global tensors: those a rank holds, those a checkpoint holds, and their overlaps.

Both are boxes of named global tensors, so loading does not depend on the layout that saved. PyTorch's
torch.distributed.checkpoint does the same (its metadata lists chunks with offsets and sizes).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.parameters import Box, ParamSpec

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

    name: kind and global name, like `params/model.norm.weight` or `optimizer.exp_avg/model.norm.weight`.
    shape: of the global tensor.
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
        box, tensor_shape = self.box, tuple(self.tensor.shape)
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
    """A box of a tensor in a checkpoint, saved as tensor `key` of the safetensors file `file`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class SavedTensor:
    """Where a checkpoint stores a global tensor. boxes: cover it exactly once. dtype_name: a key of DTYPES."""

    dtype_name: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


def make_tensor_shards(kind: str, spec: ParamSpec, tensor: Tensor, rank: int) -> list[TensorShard]:
    """Return the shards of a tensor that is sharded like its parameter: the parameter itself or an optimizer state.

    kind: prefix of the name, as `params` or `optimizer.exp_avg`.
    tensor: has the shape of the spec's only box, or holds the spec's boxes one after another in contiguous memory.
    rank: this rank's global rank; it saves the shards if it is the spec's owner.
    """
    name, is_saved_here = f"{kind}/{spec.name}", spec.owner == rank
    if len(spec.boxes) == 1 and tuple(tensor.shape) == spec.boxes[0].shape:
        return [TensorShard(name, spec.shape, spec.boxes[0], tensor, is_saved_here)]
    if tensor.numel() != spec.numel:
        raise ValueError(f"{name}: the tensor holds {tensor.numel()} elements, the boxes of its spec {spec.numel}")
    flat, local_shards, start = tensor.detach().view(-1), [], 0
    for box in spec.boxes:
        part = flat[start : start + box.numel].view(box.shape)
        local_shards.append(TensorShard(name, spec.shape, box, part, is_saved_here))
        start += box.numel
    return local_shards


def format_box(box: Box) -> str:
    """Format a box like an index expression: `[0:4,8:16]`."""
    return "[" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def shard_key(shard: TensorShard) -> str:
    """Return the key under which a shard is saved in a safetensors file."""
    return shard.name + format_box(shard.box)


def shards_to_save(local_shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """Yield the shards that this rank saves; empty boxes are skipped."""
    return (shard for shard in local_shards if shard.is_saved_here and shard.box.numel)


def describe_local_shards(local_shards: Iterable[TensorShard], file: str) -> dict[str, SavedTensor]:
    """Describe by name the global tensors of which this rank holds shards.

    Each description lists only the boxes that this rank saves, which may be none. file: the name of this rank's file.
    """
    local_shards = list(local_shards)
    tensors = _join((shard.name, SavedTensor(shard.dtype_name, shard.shape, ())) for shard in local_shards)
    return _join(
        [*tensors.items()]
        + [
            (p.name, SavedTensor(p.dtype_name, p.shape, (SavedBox(p.box, file, shard_key(p)),)))
            for p in shards_to_save(local_shards)
        ]
    )


def merge_saved_tensors(descriptions: Iterable[dict[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Merge the descriptions of all ranks into one for the whole checkpoint.

    descriptions: of each rank, from `describe_local_shards`. Raises ValueError unless exactly one rank saves each
    element, and all ranks agree on shapes and dtypes.
    """
    tensors = _join(item for description in descriptions for item in description.items())
    for name, tensor in tensors.items():
        check_covered(name, tensor)
    return tensors


def find_overlaps(shard: TensorShard, tensor: SavedTensor) -> list[tuple[SavedBox, Box]]:
    """Return each saved box of `tensor` that overlaps a shard, with the intersection of the two as a global box."""
    overlaps = ((saved, saved.box.intersect(shard.box)) for saved in tensor.boxes)
    return [(saved, box) for saved, box in overlaps if box is not None]


def _join(items: Iterable[tuple[str, SavedTensor]]) -> dict[str, SavedTensor]:
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[SavedBox]] = {}
    for name, tensor in items:
        known = facts.setdefault(name, (tensor.dtype_name, tensor.shape))
        if known != (tensor.dtype_name, tensor.shape):
            raise ValueError(
                f"{name} is {known[0]} of shape {known[1]} here and {tensor.dtype_name} {tensor.shape} there"
            )
        boxes.setdefault(name, []).extend(tensor.boxes)
    return {name: SavedTensor(*facts[name], tuple(boxes[name])) for name in facts}


def check_covered(name: str, tensor: SavedTensor) -> None:
    """Raise ValueError unless the boxes of a tensor cover it exactly once. name: of the tensor, for messages."""
    open_boxes: list[SavedBox] = []
    for saved in sorted(tensor.boxes, key=lambda saved: saved.box.start):
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
    count, total = sum(saved.box.numel for saved in tensor.boxes), Box.whole(tensor.shape).numel
    if count < total:
        given = ", ".join(format_box(saved.box) for saved in tensor.boxes[:4]) or "no box"
        more = f" and {len(tensor.boxes) - 4} more" if len(tensor.boxes) > 4 else ""
        raise ValueError(f"{name}: {count} of {total} elements are written ({given}{more})")
