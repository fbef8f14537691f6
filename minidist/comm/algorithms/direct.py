"""Algorithms whose ranks talk to each other directly: everything to everybody, and the pairwise all-to-all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm.algorithms.root import tree_broadcast, tree_reduce
from minidist.comm.algorithms.rounds import check, combine, cut, finish, row, together
from minidist.comm.group import Group


def naive_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: everybody sends all it has to everybody.

    One round, `size - 1` times the bytes, and memory for `size - 1` more tensors. Having all contributions at once, it
    reduces them in rank order, 16-bit floats in float32 and rounded once: the most exact of all.
    """
    check(op, tensor.dtype)
    mine, others = row(tensor), [rank for rank in range(group.size) if rank != group.rank]
    arrived = {rank: torch.empty_like(mine) for rank in others} | {group.rank: mine}
    together(group, send=[(mine, rank) for rank in others], recv=[(arrived[rank], rank) for rank in others])
    floating = tensor.dtype.is_floating_point
    wide = torch.promote_types(tensor.dtype, torch.float32) if floating else tensor.dtype
    total = arrived[0].to(wide, copy=True)
    for rank in range(1, group.size):
        combine(total, arrived[rank].to(wide), op)
    finish(total, op, group.size)
    mine.copy_(total)


def tree_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: up a binomial tree, then down."""
    tree_reduce(tensor, 0, group, op)
    tree_broadcast(tensor, 0, group)


def pairwise_all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> None:
    """Send part i of `input` to rank i and receive its part for this rank as part i of `output`.

    The parts are consecutive along dimension 0: of equal length, or of the lengths given in rows by the splits.
    In round k every rank sends to the one k places on, so nobody receives from two at once. Thakur et al. 2005,
    section 4.3.
    """
    size, rank = group.size, group.rank
    for what, whole, splits in (("output", output, output_splits), ("input", input, input_splits)):
        rows = whole.shape[0] if whole.dim() else 0
        if (splits is None and rows % size) or (splits is not None and (len(splits) != size or sum(splits) != rows)):
            cuts = f"{size} equal parts" if splits is None else f"the parts {list(splits)}"
            raise ValueError(f"all_to_all over {size} ranks: {rows} rows of {what} do not make {cuts}")
    leaving, arriving = _parts(input, input_splits, size), _parts(output, output_splits, size)
    arriving[rank].copy_(leaving[rank])
    for step in range(1, size):
        right, left = (rank + step) % size, (rank - step) % size
        together(group, send=[(leaving[right], right)], recv=[(arriving[left], left)])


def _parts(whole: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    if splits is None:
        return cut(row(whole), size)
    width = whole[0].numel() if whole.shape[0] else 0
    return list(row(whole).split([rows * width for rows in splits]))
