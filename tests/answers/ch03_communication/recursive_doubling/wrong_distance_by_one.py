"""powers_of_two: distance 1, 2, 3 instead of 1, 2, 4"""

import torch

from minidist.comm.algorithms.halving import fold, unfold
from minidist.comm.algorithms.rounds import check, combine, finish, row, together
from minidist.comm.power_of_two import Seats


def doubling_all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    mine, seats = row(tensor), Seats(group.size)
    fold(mine, seats, group, op)
    if not seats.stands(group.rank):
        arriving, distance = torch.empty_like(mine), 1
        while distance < seats.core:
            peer = seats.first(seats.of(group.rank) ^ distance)
            together(group, send=[(mine, peer)], recv=[(arriving, peer)])
            combine(mine, arriving, op)
            distance += 1
        finish(mine, op, group.size)
    unfold(mine, seats, group)
