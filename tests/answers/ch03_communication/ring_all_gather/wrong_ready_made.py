"""everybody_has_every_part: a library's broadcast for every part"""

from minidist.comm import broadcast


def travel(parts, group):
    for rank, part in enumerate(parts):
        broadcast(part, rank, group)
