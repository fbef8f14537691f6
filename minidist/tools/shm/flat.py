"""Tensors as the backend sees them: one row of elements, or of bytes."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """A view (n,) of all elements, in the order of memory, that autograd does not follow.

    Raises ValueError when they do not lie together, or not on the CPU.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"the backend shm takes dense tensors on CPU, not {tensor.layout} on {tensor.device}")
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    raise ValueError(
        f"Tensors must be contiguous; this one has shape {list(tensor.shape)} and {tensor.stride()} strides"
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """The same as uint8."""
    return flat(tensor).view(torch.uint8)


def named(tensor: Tensor) -> str:
    """What two ranks must agree on: dtype and number of elements."""
    return _words(tensor.dtype, tensor.shape)[0]


def rows(tensor: Tensor) -> str:
    """The shape, for a person."""
    return _words(tensor.dtype, tensor.shape)[1]


@functools.lru_cache(1024)
def _words(dtype: torch.dtype, shape: torch.Size) -> tuple[str, str]:
    return f"{str(dtype).removeprefix('torch.')} {shape.numel()}", str(list(shape))


def parts_of(whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """`whole` as one flat tensor per rank. Raises ValueError when it is not `size` times `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {size} ranks with a part of "
            f"{part.numel()} of {part.dtype} need {size * part.numel()}"
        )
    return list(flat(whole).split(part.numel())) if part.numel() else [flat(whole)] * size


def check_parts(what: str, parts: Sequence[Tensor], like: Tensor, size: int) -> None:
    """Raise ValueError when there is not one tensor per rank, each as large as `like`."""
    if len(parts) != size:
        raise ValueError(f"{what} takes a tensor per rank: {size}, not {len(parts)}")
    for part in parts:
        if part.numel() != like.numel() or part.dtype != like.dtype:
            raise ValueError(
                f"{what}: one part has {part.numel()} elements of {part.dtype}, another {like.numel()} of {like.dtype}"
            )


def split_rows(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """One flat tensor of bytes per rank: along dimension 0, of equal length or as `splits` says. Raises ValueError."""
    count = tensor.shape[0] if tensor.dim() else 1
    if not splits and count % size:
        raise ValueError(f"all_to_all: dimension 0 has {count} rows, which {size} ranks cannot share equally")
    lengths = list(splits) or [count // size] * size
    if len(lengths) != size or sum(lengths) != count:
        raise ValueError(f"all_to_all: the splits {lengths} do not cut {count} rows into {size} parts")
    row = tensor.nbytes // count if count else 0
    return list(as_bytes(tensor).split([length * row for length in lengths]))
