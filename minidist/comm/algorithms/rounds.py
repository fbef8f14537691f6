"""What the algorithms share: a tensor as one row of elements, parts of a row, a round of transfers, a reduction.

Sums of 16-bit floats: what travels is of the tensor's own dtype, so every partial sum is rounded to it before it is
sent on. The addition of two parts itself is in float32 (torch's rule for them). Only `naive` sees all contributions at
once and rounds once.

A mean is the sum, divided once at its end by the number of ranks. Whole numbers have no mean here: it is refused, since
dividing them would round in a way nobody asked for. NaN in, NaN out, for every reduction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm.collectives import Transfer, batch
from minidist.comm.direct_exchange import COMBINE
from minidist.comm.group import Group
from minidist.comm.wire_bytes import chunks

_COMBINE = {"sum": COMBINE["sum"], "mean": torch.add, **COMBINE}


def row(tensor: Tensor) -> Tensor:
    """The elements of `tensor` (any shape) in memory order: (n,), a view. Raises ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.view(-1)


def cut(elements: Tensor, size: int) -> list[Tensor]:
    """Views of `size` consecutive parts of a row; their lengths differ by at most one and may be 0."""
    return list(elements.split(chunks(elements.numel(), size)))


def together(group: Group, send: Sequence[tuple[Tensor, int]] = (), recv: Sequence[tuple[Tensor, int]] = ()) -> None:
    """One round: start all transfers, (part of a row, peer) each, and return when they are done.

    Started together they cannot deadlock, in whatever order both ends list them. Empty parts are not sent: both ends
    know the lengths.
    """
    transfers = [Transfer("send", part, peer) for part, peer in send if part.numel()]
    transfers += [Transfer("recv", part, peer) for part, peer in recv if part.numel()]
    batch(transfers, group)


def check(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a reduction that there is not, before anything is sent."""
    if op not in _COMBINE:
        raise ValueError(f"no reduction {op!r}: possible are {', '.join(_COMBINE)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"no mean of {dtype}: take the sum and divide it the way you need")


def combine(into: Tensor, other: Tensor, op: str) -> None:
    """Reduce `other` into `into`, elementwise."""
    _COMBINE[op](into, other, out=into)


def finish(total: Tensor, op: str, size: int) -> None:
    """Make a mean of the sum of `size` ranks; other reductions are complete."""
    if op == "mean":
        total.div_(size)
