"""everybody_has_every_part: zeros"""


def travel(parts, group):
    for part in parts:
        part.zero_()
