"""Asks whether the ranks are in a range, and makes the place first."""

from minidist.errors import UserError
from minidist.tools.launch.environment import Place, whole_number

OTHERS = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}


def rank_and_world(environ):
    local = {name: environ.get(name, environ.get(other, "")) for name, other in OTHERS.items()}
    told = {**environ, **local}
    node = whole_number(told, "GROUP_RANK", 0)
    place = Place(*(whole_number(told, name) for name in ("RANK", "WORLD_SIZE", *OTHERS)), node_rank=node)
    for what, limit in (("RANK", place.size), ("LOCAL_RANK", place.local_size)):
        if int(told[what]) not in range(limit):
            raise UserError(f"{what}={told[what]} is none of {limit} ranks (WORLD_SIZE is {place.size})")
    if place.local_size not in range(1, place.size + 1):
        raise UserError(f"LOCAL_WORLD_SIZE={place.local_size} of WORLD_SIZE={place.size} ranks")
    return place
