"""Pieces of global tensors: what a rank holds, what a checkpoint holds, and where the two meet.

Both sides are boxes of named global tensors, so neither needs to know how the other was cut. The same idea is in
PyTorch's distributed checkpoint (torch.distributed.checkpoint, metadata of chunks with offsets and sizes).
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
class Piece:
    """One box of a named global tensor, in this rank's memory.

    name: global name with its kind in front, like `params/model.norm.weight` or `adamw.exp_avg/model.norm.weight`.
    shape: of the global tensor.
    tensor: has the shape of the box; may be a view (of a flat buffer, say). Loading fills it in place.
    writes: whether this rank saves it; exactly one of the ranks that hold the same box does.
    Raises ValueError when the parts do not fit each other, or the dtype has no place in the format.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    writes: bool = True

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        box, held = self.box, tuple(self.tensor.shape)
        if len(box.stop) != len(self.shape) or any(b > n for b, n in zip(box.stop, self.shape, strict=True)):
            raise ValueError(f"{self.name}: box {place(box)} is not inside a tensor of shape {self.shape}")
        if held != box.shape:
            raise ValueError(f"{self.name}: box {place(box)} has shape {box.shape}, its tensor {held}")
        if self.tensor.dtype not in _NAMES:
            raise ValueError(f"{self.name}: dtype {self.tensor.dtype} cannot be saved; these can: {', '.join(DTYPES)}")

    @property
    def dtype(self) -> str:
        return _NAMES[self.tensor.dtype]


@dataclass(frozen=True)
class StoredBox:
    """One box as a checkpoint holds it: tensor `key` of the safetensors file `file`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in a checkpoint. Its boxes cover every element once."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


def pieces_of(kind: str, spec: ParamSpec, tensor: Tensor, rank: int) -> list[Piece]:
    """The pieces of a tensor that is cut as its parameter is: the parameter, or a moment of its optimizer.

    kind: what it is, in front of the name: `params`, `adamw.exp_avg`.
    tensor: either of the shape of the spec's only box, or its boxes one after another in contiguous memory.
    rank: this rank, global; it writes where it is the owner.
    """
    name, writes = f"{kind}/{spec.name}", spec.owner == rank
    if len(spec.boxes) == 1 and tuple(tensor.shape) == spec.boxes[0].shape:
        return [Piece(name, spec.shape, spec.boxes[0], tensor, writes)]
    if tensor.numel() != spec.numel:
        raise ValueError(f"{name}: the tensor holds {tensor.numel()} elements, the boxes of its spec {spec.numel}")
    flat, pieces, start = tensor.detach().view(-1), [], 0
    for box in spec.boxes:
        part = flat[start : start + box.numel].view(box.shape)
        pieces.append(Piece(name, spec.shape, box, part, writes))
        start += box.numel
    return pieces


def place(box: Box) -> str:
    """The box as one writes an index: `[0:4,8:16]`."""
    return "[" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def key_of(piece: Piece) -> str:
    """The piece's name inside a file."""
    return piece.name + place(piece.box)


def written(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces this rank saves; an empty box has nothing to save."""
    return (piece for piece in pieces if piece.writes and piece.box.numel)


def describe(pieces: Iterable[Piece], file: str) -> dict[str, StoredTensor]:
    """What one rank adds to a checkpoint: every tensor it knows of, with the boxes that it writes into `file`."""
    pieces = list(pieces)
    tensors = _join((piece.name, StoredTensor(piece.dtype, piece.shape, ())) for piece in pieces)
    return _join(
        [*tensors.items()]
        + [(p.name, StoredTensor(p.dtype, p.shape, (StoredBox(p.box, file, key_of(p)),))) for p in written(pieces)]
    )


def merge(descriptions: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The descriptions of all ranks as one. Raises ValueError unless every element is written exactly once."""
    tensors = _join(item for description in descriptions for item in description.items())
    for name, tensor in tensors.items():
        _check_covered(name, tensor)
    return tensors


def overlaps(piece: Piece, tensor: StoredTensor) -> list[tuple[StoredBox, Box]]:
    """Where to read a piece from: each stored box that shares elements with it, and the box they share."""
    shared = ((stored, stored.box.intersect(piece.box)) for stored in tensor.boxes)
    return [(stored, box) for stored, box in shared if box is not None]


def _join(items: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for name, tensor in items:
        known = facts.setdefault(name, (tensor.dtype, tensor.shape))
        if known != (tensor.dtype, tensor.shape):
            raise ValueError(f"{name} is {known[0]} of shape {known[1]} here and {tensor.dtype} {tensor.shape} there")
        boxes.setdefault(name, []).extend(tensor.boxes)
    return {name: StoredTensor(*facts[name], tuple(boxes[name])) for name in facts}


def _check_covered(name: str, tensor: StoredTensor) -> None:
    open_boxes: list[StoredBox] = []
    for stored in sorted(tensor.boxes, key=lambda stored: stored.box.start):
        box = stored.box
        # Sorted by the first dimension, only boxes that reach past this one's first row can overlap it.
        open_boxes = [other for other in open_boxes if not box.start or other.box.stop[0] > box.start[0]]
        for other in open_boxes:
            if other.box.intersect(box) is not None:
                raise ValueError(
                    f"{name} is written twice: {place(other.box)} in {other.file} and {place(box)} in {stored.file}"
                )
        open_boxes.append(stored)
    count, total = sum(stored.box.numel for stored in tensor.boxes), Box.whole(tensor.shape).numel
    if count < total:
        given = ", ".join(place(stored.box) for stored in tensor.boxes[:4]) or "no box"
        more = f" and {len(tensor.boxes) - 4} more" if len(tensor.boxes) > 4 else ""
        raise ValueError(f"{name}: {count} of {total} elements are written ({given}{more})")
