"""Recursive halving and doubling: partners at distance 1, 2, 4, ... swap, so log2(size) rounds are enough.

halve    reduce-scatter: give away the half of the row that the partner's side keeps, add what comes for one's own
double   all-gather: swap all one has with a partner who has as much; what one has doubles
Rabenseifner's all-reduce is the first and then the second: the bytes of the ring in a logarithm of its rounds.
`doubling_all_reduce` swaps the whole row every round: more bytes, half the rounds, and so the best for short rows.

A power of two of ranks is needed; `Seats` makes any number one. Thakur et al. 2005, sections 4.1 (recursive doubling),
4.4 (recursive halving), 4.5 (all-reduce); Rabenseifner 2004.
"""

import torch
from torch import Tensor

from minidist.comm.algorithms.rounds import check, combine, finish, row, together
from minidist.comm.collectives import check_parts
from minidist.comm.group import Group
from minidist.comm.power_of_two import Seats
from minidist.comm.wire_bytes import chunks


def fold(mine: Tensor, seats: Seats, group: Group, op: str) -> None:
    """Ranks without a seat hand their row to the one that sits for them, which adds it to its own."""
    if seats.stands(group.rank):
        together(group, send=[(mine, group.rank - 1)])
    elif (guest := seats.guest(group.rank)) is not None:
        arriving = torch.empty_like(mine)
        together(group, recv=[(arriving, guest)])
        combine(mine, arriving, op)


def unfold(mine: Tensor, seats: Seats, group: Group) -> None:
    """Ranks without a seat get the whole row from the one that sits for them."""
    if seats.stands(group.rank):
        together(group, recv=[(mine, group.rank - 1)])
    elif (guest := seats.guest(group.rank)) is not None:
        together(group, send=[(mine, guest)])


def halve(mine: Tensor, bounds: list[int], seats: Seats, group: Group, op: str) -> None:
    """Reduce over the seats: seat s ends with `mine[bounds[s] : bounds[s + 1]]` complete. Other ranks do nothing.

    bounds: where in the row what a seat ends with begins, and the end of the row: (core + 1,).
    """
    if seats.stands(group.rank):
        return
    seat = seats.of(group.rank)
    scratch = torch.empty_like(mine)
    low, high = 0, seats.core  # this rank still reduces for the seats from low to below high
    while high - low > 1:
        middle = (low + high) // 2
        distance = middle - low
        first, second = mine[bounds[low] : bounds[middle]], mine[bounds[middle] : bounds[high]]
        if seat < middle:
            partner, staying, leaving, high = seat + distance, first, second, middle
        else:
            partner, staying, leaving, low = seat - distance, second, first, middle
        peer, arriving = seats.first(partner), scratch[: staying.numel()]
        together(group, send=[(leaving, peer)], recv=[(arriving, peer)])
        combine(staying, arriving, op)


def double(mine: Tensor, bounds: list[int], seats: Seats, group: Group) -> None:
    """Gather over the seats: every seat's stretch of the row reaches all of them. The way back of `halve`."""
    if seats.stands(group.rank):
        return
    seat, distance = seats.of(group.rank), 1
    while distance < seats.core:
        partner = seat ^ distance  # the other half of an aligned block of 2 * distance seats
        low, other = seat - seat % distance, partner - partner % distance
        have = mine[bounds[low] : bounds[low + distance]]
        lack = mine[bounds[other] : bounds[other + distance]]
        peer = seats.first(partner)
        together(group, send=[(have, peer)], recv=[(lack, peer)])
        distance *= 2


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str = "sum") -> None:
    """Leave part `rank` of the reduction of `input` (size * n, ...) in `output` (n, ...); `input` is not changed."""
    check_parts("reduce_scatter", whole=input, part=output, group=group)
    check(op, input.dtype)
    seats, n, rank = Seats(group.size), output.numel(), group.rank
    work, result = row(input).clone(), row(output)
    fold(work, seats, group, op)
    halve(work, [n * seats.first(seat) for seat in range(seats.core + 1)], seats, group, op)
    if seats.stands(rank):
        together(group, recv=[(result, rank - 1)])
    else:
        if (guest := seats.guest(rank)) is not None:
            together(group, send=[(work[n * guest : n * (guest + 1)], guest)])
        result.copy_(work[n * rank : n * (rank + 1)])
    finish(result, op, group.size)


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...) on every rank."""
    check_parts("all_gather", whole=output, part=input, group=group)
    seats, n, rank, mine = Seats(group.size), input.numel(), group.rank, row(output)
    mine[n * rank : n * (rank + 1)].copy_(row(input))
    guest = seats.guest(rank)
    if seats.stands(rank):
        together(group, send=[(mine[n * rank : n * (rank + 1)], rank - 1)])
    elif guest is not None:
        together(group, recv=[(mine[n * guest : n * (guest + 1)], guest)])
    double(mine, [n * seats.first(seat) for seat in range(seats.core + 1)], seats, group)
    # A rank without a seat has its own part: it gets what is before it and what is behind it.
    if seats.stands(rank):
        together(group, recv=[(mine[: n * rank], rank - 1), (mine[n * (rank + 1) :], rank - 1)])
    elif guest is not None:
        together(group, send=[(mine[: n * guest], guest), (mine[n * (guest + 1) :], guest)])


def doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: partners swap their whole rows and add.

    Both partners add the same two numbers, and a + b = b + a bit for bit, so all ranks get the same bits, which do not
    depend on where a tensor is cut.
    """
    check(op, tensor.dtype)
    mine, seats = row(tensor), Seats(group.size)
    fold(mine, seats, group, op)
    if not seats.stands(group.rank):
        arriving, distance = torch.empty_like(mine), 1
        while distance < seats.core:
            peer = seats.first(seats.of(group.rank) ^ distance)
            together(group, send=[(mine, peer)], recv=[(arriving, peer)])
            combine(mine, arriving, op)
            distance *= 2
        finish(mine, op, group.size)
    unfold(mine, seats, group)


def rabenseifner_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Replace `tensor` (any shape) on every rank by its reduction: recursive halving, then recursive doubling."""
    check(op, tensor.dtype)
    mine, seats = row(tensor), Seats(group.size)
    lengths = chunks(mine.numel(), seats.core)
    bounds = [sum(lengths[:seat]) for seat in range(seats.core + 1)]
    fold(mine, seats, group, op)
    halve(mine, bounds, seats, group, op)
    if not seats.stands(group.rank):
        seat = seats.of(group.rank)
        finish(mine[bounds[seat] : bounds[seat + 1]], op, group.size)
    double(mine, bounds, seats, group)
    unfold(mine, seats, group)
