"""The ring: every rank only ever sends to the next one, and what is sent in all is as little as can be.

The row is cut into one part per rank. In `size - 1` rounds the partial sums of all parts travel round the ring and each
rank adds its share as they pass: reduce-scatter. In `size - 1` more the finished parts travel round: all-gather. Both
after another are the all-reduce that is optimal in bytes: 2 (size - 1) / size of the row per rank.
Patarasuk and Yuan 2009, section 3; Thakur et al. 2005, sections 4.1 and 4.4.
"""

from torch import Tensor

from minidist.comm.algorithms.rounds import check, combine, cut, finish, row, together
from minidist.comm.collectives import check_parts
from minidist.comm.group import Group


def travel_and_add(parts: list[Tensor], group: Group, op: str) -> None:
    """Reduce: afterwards `parts[rank]` is complete on this rank, and the other parts hold partial results.

    parts: one view per rank, in all the row; the same lengths on every rank.
    """
    size, rank = group.size, group.rank
    scratch = parts[0].new_empty(max(part.numel() for part in parts))
    for step in range(size - 1):
        leaving, staying = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        arriving = scratch[: staying.numel()]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])
        combine(staying, arriving, op)  # it leaves in the next round, or is the part this rank keeps


def travel(parts: list[Tensor], group: Group) -> None:
    """Gather: `parts[rank]` of every rank goes round, until each rank has them all."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        leaving, arriving = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        together(group, send=[(leaving, (rank + 1) % size)], recv=[(arriving, (rank - 1) % size)])


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str = "sum") -> None:
    """Leave part `rank` of the reduction of `input` (size * n, ...) in `output` (n, ...); `input` is not changed."""
    check_parts("reduce_scatter", whole=input, part=output, group=group)
    check(op, input.dtype)
    parts = cut(row(input).clone(), group.size)
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, group.size)
    row(output).copy_(parts[group.rank])


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...) on every rank."""
    check_parts("all_gather", whole=output, part=input, group=group)
    parts = cut(row(output), group.size)
    parts[group.rank].copy_(row(input))
    travel(parts, group)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: reduce-scatter, then all-gather.

    Each rank first sends the part with its own number, as in the paper, and so completes part `rank + 1`: the parts
    are named from there. Part c is added up in the order of ranks c, c + 1, ... round to c - 1, on one rank, so all
    ranks get the same bits; but where a tensor is cut decides that order.
    """
    check(op, tensor.dtype)
    parts = cut(row(tensor), group.size)
    parts = parts[1:] + parts[:1]
    travel_and_add(parts, group, op)
    finish(parts[group.rank], op, group.size)
    travel(parts, group)
