"""own_part_is_complete: the same number, whatever is added"""


def travel_and_add(parts, group, op):
    for part in parts:
        part.fill_(3.0)
