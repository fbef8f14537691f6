"""The environment variables by which torchrun and other launchers tell a process its rank."""

from collections.abc import Mapping
from typing import NamedTuple

from minidist.errors import UserError


class RankEnvironment(NamedTuple):
    """The rank of this process and the size of its job, from torchrun's environment variables.

    rank: from 0 to size - 1. size: number of ranks of the job. local_rank: this rank's number on its machine, from 0.
    local_size: number of ranks on this machine. node_rank: index of this machine, from 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int


def rank_and_world(environ: Mapping[str, str]) -> RankEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK; return them as a `RankEnvironment`.

    environ: the environment variables. Without LOCAL_RANK or LOCAL_WORLD_SIZE all ranks are on one machine, and RANK or
    WORLD_SIZE is used instead; without GROUP_RANK the node rank is 0.
    Raises UserError if RANK or WORLD_SIZE is missing, a variable is not an integer, or variables contradict each other.
    """
    rank, size = read_integer(environ, "RANK"), read_integer(environ, "WORLD_SIZE")
    local_rank = read_integer(environ, "LOCAL_RANK", rank)
    local_size = read_integer(environ, "LOCAL_WORLD_SIZE", size)
    if rank >= size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {size}; the rank must be less than the size")
    if local_rank >= local_size:
        values = f"LOCAL_RANK (or RANK without it) is {local_rank} and LOCAL_WORLD_SIZE (or WORLD_SIZE) {local_size}"
        raise UserError(f"{values}; the rank must be less than the size")
    if local_size > size:
        raise UserError(
            f"LOCAL_WORLD_SIZE is {local_size} and WORLD_SIZE {size}; one machine cannot have more ranks than the job"
        )
    return RankEnvironment(rank, size, local_rank, local_size, read_integer(environ, "GROUP_RANK", 0))


def read_integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the environment variable `name` as a non-negative integer; `default` if the variable is not set.

    Raises UserError if the variable is not set and there is no default, or is not a non-negative integer.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        problem = "is not set" if text is None else f"is {text!r}"
        raise UserError(f"{name} {problem}; start with torchrun, which sets it to a whole number, or with --ranks N")
    return int(text)
