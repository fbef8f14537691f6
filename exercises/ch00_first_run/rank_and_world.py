"""Read a process's rank from its environment.

Write the missing lines of rank_and_world; its docstring specifies the result.
You may call: read_integer, RankEnvironment, UserError.
Check it with: python -m exercises check rank_and_world

Stub d2b8ebc2.
"""

from collections.abc import Mapping

from minidist.errors import UserError
from minidist.tools.launch.environment import RankEnvironment, read_integer


def rank_and_world(environ: Mapping[str, str]) -> RankEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK from environment variables.

    Without LOCAL_RANK or LOCAL_WORLD_SIZE all ranks are on one machine, and RANK and WORLD_SIZE take their place;
    without GROUP_RANK this is the first machine.
    Raises UserError when RANK or WORLD_SIZE is missing, a variable is no integer, or they contradict each other.
    """
    raise NotImplementedError("return this rank's assignment; raise UserError for contradictory numbers")
