"""a_logarithm_of_messages: the seats pass rows round a ring"""

import torch

from minidist.comm.algorithms.halving import fold, unfold
from minidist.comm.algorithms.rounds import check, combine, finish, row, together
from minidist.comm.power_of_two import Seats


def doubling_all_reduce(tensor, group, op="sum"):
    check(op, tensor.dtype)
    mine, seats = row(tensor), Seats(group.size)
    fold(mine, seats, group, op)
    if not seats.stands(group.rank):
        seat, leaving = seats.of(group.rank), mine.clone()
        for _ in range(seats.core - 1):
            arriving = torch.empty_like(mine)
            right, left = seats.first((seat + 1) % seats.core), seats.first((seat - 1) % seats.core)
            together(group, send=[(leaving, right)], recv=[(arriving, left)])
            combine(mine, arriving, op)
            leaving = arriving
        finish(mine, op, group.size)
    unfold(mine, seats, group)
