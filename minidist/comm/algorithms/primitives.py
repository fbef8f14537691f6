"""Primitives of the algorithms: flat views and chunks of a tensor, one round of transfers, elementwise reductions.

Sums of 16-bit floats: ranks send the tensor's own dtype, so every partial sum is rounded to it before it is sent on.
One addition is computed in float32 (torch's rule). Only `naive_all_reduce` has all inputs at once and rounds once.

A mean is the sum divided once, at the end, by the number of ranks. Integer means are refused, because the rounding
would be silent. NaN in, NaN out, for every reduction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm.collectives import P2POp, batch_send_recv
from minidist.comm.direct_exchange import ELEMENTWISE_REDUCE
from minidist.comm.group import Group
from minidist.comm.wire_bytes import chunk_sizes

_COMBINE = {"sum": ELEMENTWISE_REDUCE["sum"], "mean": torch.add, **ELEMENTWISE_REDUCE}


def flat_view(tensor: Tensor) -> Tensor:
    """View `tensor` (any shape) as one dimension, (n,). Raises ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.view(-1)


def split_chunks(flat: Tensor, num_chunks: int) -> list[Tensor]:
    """Split a flat tensor (n,) into `num_chunks` consecutive views, whose lengths differ by at most 1 and may be 0."""
    return list(flat.split(chunk_sizes(flat.numel(), num_chunks)))


def exchange(group: Group, send: Sequence[tuple[Tensor, int]] = (), recv: Sequence[tuple[Tensor, int]] = ()) -> None:
    """Send and receive tensors, each given as (contiguous tensor, peer's group rank); return when all have completed.

    All transfers are launched together, so their order in the lists cannot cause a deadlock. Empty tensors are neither
    sent nor received: both ends know the lengths.
    """
    transfers = [P2POp("send", part, peer) for part, peer in send if part.numel()]
    transfers += [P2POp("recv", part, peer) for part, peer in recv if part.numel()]
    batch_send_recv(transfers, group)


def check_reduce_op(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `op` is "sum", "max", "min", "product" or, for non-integer dtypes, "mean"."""
    if op not in _COMBINE:
        raise ValueError(f"no reduction {op!r}: possible are {', '.join(_COMBINE)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"no mean of {dtype}: take the sum and divide it the way you need")


def reduce_into(into: Tensor, other: Tensor, op: str) -> None:
    """Replace `into` by the elementwise reduction of `into` and `other`. op "mean" adds; see `divide_mean`."""
    _COMBINE[op](into, other, out=into)


def divide_mean(total: Tensor, op: str, group_size: int) -> None:
    """Divide `total`, a sum over the group, by `group_size` in place if `op` is "mean"; otherwise do nothing."""
    if op == "mean":
        total.div_(group_size)
