"""Receives once, by the highest bit of its place, and then feeds; blocking calls of the door."""

from minidist.comm import recv, send


def tree_broadcast(tensor, src, group):
    size = group.size
    place = (group.rank - src) % size
    if place:
        recv(tensor, (src + place - (1 << (place.bit_length() - 1))) % size, group)
    distance = 1 << place.bit_length()
    while place + distance < size:
        send(tensor, (src + place + distance) % size, group)
        distance *= 2
