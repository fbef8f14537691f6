"""Tensors as the backend sees them: one row of elements, or of bytes."""

import torch
from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """A view (n,) of all elements, in the order of memory. Raises ValueError when they do not lie together."""
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
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()}"


def rows(tensor: Tensor) -> str:
    """The shape, for a person."""
    return str(list(tensor.shape))
