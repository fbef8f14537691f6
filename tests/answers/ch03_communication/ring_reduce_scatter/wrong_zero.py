"""own_part_is_complete: zeros"""


def travel_and_add(parts, group, op):
    for part in parts:
        part.zero_()
