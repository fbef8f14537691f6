"""Read a process's rank from its environment.

Write the missing lines of rank_and_world; its docstring specifies the result.
You may call: read_integer, RankEnvironment, UserError.
Check it with: python -m exercises check rank_and_world

Stub a75b9f24.
"""

from collections.abc import Mapping

from minidist.errors import UserError
from minidist.tools.launch.environment import RankEnvironment, read_integer


def rank_and_world(environ: Mapping[str, str]) -> RankEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK; return them as a `RankEnvironment`.

    environ: the environment variables. Without LOCAL_RANK or LOCAL_WORLD_SIZE all ranks are on one machine, and RANK or
    WORLD_SIZE is used instead; without GROUP_RANK the node rank is 0.
    Raises UserError if RANK or WORLD_SIZE is missing, a variable is not an integer, or variables contradict each other.
    """
    raise NotImplementedError("return this rank's assignment; raise UserError for contradictory numbers")
