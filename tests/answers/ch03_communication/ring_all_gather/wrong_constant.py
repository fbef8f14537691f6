"""everybody_has_every_part: the same number everywhere"""


def travel(parts, group):
    for part in parts:
        part.fill_(100.0)
