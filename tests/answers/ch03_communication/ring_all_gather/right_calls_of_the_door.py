"""Starts the send, receives, waits."""

from minidist.comm import recv, send


def travel(parts, group):
    size, at = group.size, group.rank
    for _ in range(size - 1):
        handle = send(parts[at], (group.rank + 1) % size, group, async_op=True)
        at = (at - 1) % size
        recv(parts[at], (group.rank - 1) % size, group)
        handle.wait()
