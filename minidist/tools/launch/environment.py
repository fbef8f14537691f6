"""A rank's place as its launcher tells it, in environment variables."""

from collections.abc import Mapping
from typing import NamedTuple

from minidist.errors import UserError


class Place(NamedTuple):
    """Rank `rank` of `size` in all; `local_rank` of the `local_size` on this machine, which is machine `node_rank`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int


def rank_and_world(environ: Mapping[str, str]) -> Place:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK tell.

    Without LOCAL_RANK or LOCAL_WORLD_SIZE all ranks are on one machine, where they are RANK and WORLD_SIZE; without
    GROUP_RANK this is the first machine.
    Raises UserError when RANK or WORLD_SIZE is missing, one is no whole number, or they do not fit together.
    """
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    local_rank = whole_number(environ, "LOCAL_RANK", rank)
    local_size = whole_number(environ, "LOCAL_WORLD_SIZE", size)
    if rank >= size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {size}; it must be less than that")
    if local_rank >= local_size:
        told = f"LOCAL_RANK (or RANK without it) is {local_rank} and LOCAL_WORLD_SIZE (or WORLD_SIZE) {local_size}"
        raise UserError(f"{told}; it must be less than that")
    if local_size > size:
        raise UserError(f"LOCAL_WORLD_SIZE is {local_size} and WORLD_SIZE {size}; a machine has no more ranks than all")
    return Place(rank, size, local_rank, local_size, whole_number(environ, "GROUP_RANK", 0))


def whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number that a variable holds, or the default if it is not set.

    Raises UserError when it is not set and there is no default, or holds something else.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        given = "is not set" if text is None else f"is {text!r}"
        raise UserError(f"{name} {given}; start with torchrun, which sets it to a whole number, or with --ranks N")
    return int(text)
