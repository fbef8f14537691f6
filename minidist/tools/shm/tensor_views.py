"""Flat views of tensors, and the checks of their sizes."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order_view(tensor: Tensor) -> Tensor:
    """Return a detached view (n,) of all elements of the tensor, in the order in which they lie in memory.

    Raises ValueError if there are gaps between the elements, or if the tensor is sparse or not on the CPU.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"the backend shm takes dense tensors on CPU, not {tensor.layout} on {tensor.device}")
    tensor = tensor.detach()
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    raise ValueError(
        f"Tensors must be contiguous; this one has shape {list(tensor.shape)} and {tensor.stride()} strides"
    )


def byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of all elements of the tensor as a flat uint8 view.

    Raises ValueError if there are gaps between the elements, or if the tensor is sparse or not on the CPU.
    """
    return memory_order_view(tensor).view(torch.uint8)


def describe_dtype_and_numel(tensor: Tensor) -> str:
    """Return the dtype and the number of elements as text, such as "float32 1024". Ranks compare such texts."""
    return _describe(tensor.dtype, tensor.shape)[0]


def describe_shape(tensor: Tensor) -> str:
    """Return the shape of the tensor as text, such as "[4, 8]", for error messages."""
    return _describe(tensor.dtype, tensor.shape)[1]


@functools.lru_cache(1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> tuple[str, str]:
    """Return (dtype and number of elements, shape) as two texts."""
    return f"{str(dtype).removeprefix('torch.')} {shape.numel()}", str(list(shape))


def split_evenly_by_rank(whole: Tensor, part: Tensor, group_size: int) -> list[Tensor]:
    """Split `whole` into `group_size` flat views in memory order, each with as many elements as `part`.

    Raises ValueError if `whole` is not exactly `group_size` times as large as `part`, or the dtypes differ.
    """
    if whole.numel() != group_size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {group_size} ranks with a part of "
            f"{part.numel()} of {part.dtype} need {group_size * part.numel()}"
        )
    return (
        list(memory_order_view(whole).split(part.numel())) if part.numel() else [memory_order_view(whole)] * group_size
    )


def check_part_sizes(operation: str, parts: Sequence[Tensor], like: Tensor, group_size: int) -> None:
    """Raise ValueError unless `parts` has `group_size` tensors, each with the numel and dtype of `like`.

    operation: the name of the collective, for the error message.
    """
    if len(parts) != group_size:
        raise ValueError(f"{operation} takes a tensor per rank: {group_size}, not {len(parts)}")
    for part in parts:
        if part.numel() != like.numel() or part.dtype != like.dtype:
            raise ValueError(
                f"{operation}: one part has {part.numel()} elements of {part.dtype}, "
                f"another {like.numel()} of {like.dtype}"
            )


def split_rows_by_rank(tensor: Tensor, row_counts: Sequence[int], group_size: int) -> list[Tensor]:
    """Split `tensor` along dimension 0 into one part per rank; return the parts as flat uint8 views, by group rank.

    row_counts: the number of rows for each rank; empty for equal parts. Raises ValueError if there is not one count per
    rank, the counts do not add up to dimension 0, or equal parts are impossible.
    """
    count = tensor.shape[0] if tensor.dim() else 1
    if not row_counts and count % group_size:
        raise ValueError(f"all_to_all: dimension 0 has {count} rows, which {group_size} ranks cannot share equally")
    lengths = list(row_counts) or [count // group_size] * group_size
    if len(lengths) != group_size or sum(lengths) != count:
        raise ValueError(f"all_to_all: the splits {lengths} do not cut {count} rows into {group_size} parts")
    row = tensor.nbytes // count if count else 0
    return list(byte_view(tensor).split([length * row for length in lengths]))
