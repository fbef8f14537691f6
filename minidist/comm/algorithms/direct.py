"""All-reduces by direct exchange and by tree, and the pairwise all-to-all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm.algorithms.primitives import (
    check_reduce_op,
    divide_mean,
    exchange,
    flat_view,
    reduce_into,
    split_chunks,
)
from minidist.comm.algorithms.root import tree_broadcast, tree_reduce
from minidist.comm.group import Group


def naive_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place; every rank sends its tensor to every other rank.

    Each rank sends `size - 1` times the tensor, in one round, and allocates memory for `size - 1` more tensors. It
    reduces all inputs in rank order, 16-bit floats in float32 with one rounding: the most exact algorithm here.
    """
    check_reduce_op(op, tensor.dtype)
    buffer, others = flat_view(tensor), [rank for rank in range(group.size) if rank != group.rank]
    arrived = {rank: torch.empty_like(buffer) for rank in others} | {group.rank: buffer}
    exchange(group, send=[(buffer, rank) for rank in others], recv=[(arrived[rank], rank) for rank in others])
    floating = tensor.dtype.is_floating_point
    wide = torch.promote_types(tensor.dtype, torch.float32) if floating else tensor.dtype
    total = arrived[0].to(wide, copy=True)
    for rank in range(1, group.size):
        reduce_into(total, arrived[rank].to(wide), op)
    divide_mean(total, op, group.size)
    buffer.copy_(total)


def tree_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place by a tree reduce to rank 0 and a tree broadcast."""
    tree_reduce(tensor, 0, group, op)
    tree_broadcast(tensor, 0, group)


def pairwise_all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> None:
    """Collective: send part i of `input` to rank i, and receive part i of `output` from rank i.

    The parts are consecutive along dimension 0. input_splits, output_splits: the length of each rank's part; None:
    equal parts. In round k every rank sends to rank + k and receives from rank - k, so no rank receives from two ranks
    at once. Thakur et al. 2005, section 4.3. Raises ValueError when the splits do not add up to the tensors' lengths.
    """
    size, rank = group.size, group.rank
    for what, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
        rows = tensor.shape[0] if tensor.dim() else 0
        if (splits is None and rows % size) or (splits is not None and (len(splits) != size or sum(splits) != rows)):
            parts = f"{size} equal parts" if splits is None else f"parts of {list(splits)} rows"
            raise ValueError(f"all_to_all over {size} ranks: the {rows} rows of {what} cannot be split into {parts}")
    leaving, arriving = _parts(input, input_splits, size), _parts(output, output_splits, size)
    arriving[rank].copy_(leaving[rank])
    for step in range(1, size):
        right, left = (rank + step) % size, (rank - step) % size
        exchange(group, send=[(leaving[right], right)], recv=[(arriving[left], left)])


def _parts(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    if splits is None:
        return split_chunks(flat_view(tensor), size)
    width = tensor[0].numel() if tensor.shape[0] else 0
    return list(flat_view(tensor).split([rows * width for rows in splits]))
