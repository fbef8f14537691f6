"""Flat views of tensors, and the checks of their sizes."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor:
    """Return a detached view (n,) of all elements, in memory order.

    Raises ValueError when the elements are not contiguous in memory, or not on the CPU.
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


def byte_view(tensor: Tensor) -> Tensor:
    """Return `flat_view(tensor)` as uint8."""
    return flat_view(tensor).view(torch.uint8)


def describe_elements(tensor: Tensor) -> str:
    """Return "dtype number-of-elements", in which ranks must agree."""
    return _describe(tensor.dtype, tensor.shape)[0]


def describe_shape(tensor: Tensor) -> str:
    """Return the shape as text, for error messages."""
    return _describe(tensor.dtype, tensor.shape)[1]


@functools.lru_cache(1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> tuple[str, str]:
    return f"{str(dtype).removeprefix('torch.')} {shape.numel()}", str(list(shape))


def split_per_rank(whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """Split `whole` into one flat tensor per rank. Raises ValueError unless it is `size` times as large as `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {size} ranks with a part of "
            f"{part.numel()} of {part.dtype} need {size * part.numel()}"
        )
    return list(flat_view(whole).split(part.numel())) if part.numel() else [flat_view(whole)] * size


def check_sizes(what: str, parts: Sequence[Tensor], like: Tensor, size: int) -> None:
    """Raise ValueError unless `parts` has one tensor per rank, each of the size and dtype of `like`."""
    if len(parts) != size:
        raise ValueError(f"{what} takes a tensor per rank: {size}, not {len(parts)}")
    for part in parts:
        if part.numel() != like.numel() or part.dtype != like.dtype:
            raise ValueError(
                f"{what}: one part has {part.numel()} elements of {part.dtype}, another {like.numel()} of {like.dtype}"
            )


def split_rows(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Split along dimension 0 into one flat tensor of bytes per rank: equally, or by `splits` if given.

    Raises ValueError when the rows cannot be split like that.
    """
    count = tensor.shape[0] if tensor.dim() else 1
    if not splits and count % size:
        raise ValueError(f"all_to_all: dimension 0 has {count} rows, which {size} ranks cannot share equally")
    lengths = list(splits) or [count // size] * size
    if len(lengths) != size or sum(lengths) != count:
        raise ValueError(f"all_to_all: the splits {lengths} do not cut {count} rows into {size} parts")
    row = tensor.nbytes // count if count else 0
    return list(byte_view(tensor).split([length * row for length in lengths]))
