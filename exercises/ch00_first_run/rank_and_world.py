"""Read a process's rank from its environment.

torchrun starts the same program once per rank and tells each process its number in environment variables. Read them,
and refuse values that contradict each other before the first connection, where they would only hang.

environ: the environment variables, texts by name. Returns a RankEnvironment(rank, size, local_rank, local_size,
node_rank) of integers, from RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK. Each of the last three may
be missing: then RANK is used instead of LOCAL_RANK, WORLD_SIZE instead of LOCAL_WORLD_SIZE, and 0 as the node rank.
Examples:
    {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
        gives RankEnvironment(5, 8, 1, 4, 1)
    {"RANK": "1", "WORLD_SIZE": "2"} gives RankEnvironment(1, 2, 1, 2, 0)

Checked: the numbers of all ranks on one machine and on several, with equal or different numbers of ranks on each;
missing variables; and that UserError is raised, with the variable in the message, if RANK or WORLD_SIZE is missing, a
value is not a non-negative integer (such as "-1", "1.5" or ""), a rank is not below its size, or one machine would have
more ranks than the job.

You may call:
    read_integer(environ, name)   a variable as a non-negative integer; UserError if it is missing or no such number
    read_integer(environ, name, default)   the same, but `default` if the variable is missing
    RankEnvironment(rank, size, local_rank, local_size, node_rank), UserError(message)

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
