"""Starts the send, receives, waits; the running sum is a copy of its own."""

from minidist.comm import recv, send
from minidist.comm.algorithms.rounds import combine


def travel_and_add(parts, group, op):
    size, rank = group.size, group.rank
    running = parts[(rank - 1) % size].clone()
    for step in range(size - 1):
        mine = parts[(rank - 2 - step) % size]
        arrived = mine.clone()
        handle = send(running, (rank + 1) % size, group, async_op=True)
        recv(arrived, (rank - 1) % size, group)
        handle.wait()
        combine(arrived, mine, op)
        running = arrived
    parts[rank].copy_(running if size > 1 else parts[rank])
