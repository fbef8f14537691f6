"""The partner is above or below, by the bit of the seat; the calls are those of the door."""

import torch

from minidist.comm import recv, send
from minidist.comm.algorithms.halving import fold, unfold
from minidist.comm.algorithms.rounds import check, combine, finish, row
from minidist.comm.power_of_two import Seats


def doubling_all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    mine, seats = row(tensor), Seats(group.size)
    fold(mine, seats, group, op)
    if not seats.stands(group.rank):
        seat = seats.of(group.rank)
        for k in range(seats.core.bit_length() - 1):
            lower = seat // 2**k % 2 == 0
            peer = seats.first(seat + 2**k if lower else seat - 2**k)
            arriving = torch.empty_like(mine)
            handle = send(mine, peer, group, async_op=True)
            recv(arriving, peer, group)
            handle.wait()
            combine(mine, arriving, op)
        finish(mine, op, group.size)
    unfold(mine, seats, group)
