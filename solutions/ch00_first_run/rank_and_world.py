"""Read a process's rank from its environment: the solution, as it stands in minidist.tools.launch.environment.

The same source runs on every rank, so only the environment can tell a process its rank. A rank in the source (rank 0
of 4, in the script that everyone copies) is claimed by every process at once, and each waits for ranks that never
connect.

The function refuses contradictory numbers before the first connection. Later the program would only hang, without a
hint at the cause. The message names the environment variables, because those are what the user can correct.

Usual wrong answers:
* raises ValueError or KeyError, without the name of the variable
* calls the package's function
* compares RANK with WORLD_SIZE as texts, and refuses rank 2 of 20
* returns rank 0 of 4, as the script that everyone copies
* compares the local rank with the local size only if LOCAL_RANK is set
* treats a missing variable as a run with one process, so four processes train separately
* takes an empty GROUP_RANK for a missing one
* refuses machines with different numbers of ranks
* uses RANK as the local rank
* computes the node rank as if all machines had equally many ranks
* computes the node rank from RANK and LOCAL_WORLD_SIZE if GROUP_RANK is missing
* fails if the launcher sets no local variables
* takes node rank 0 if GROUP_RANK is not a number
* accepts rank 2 of 2
* uses LOCAL_RANK as the rank, so the ranks of different machines collide
* returns the variables as strings
* accepts contradictory numbers
* reads NODE_RANK, which torchrun does not set, if GROUP_RANK is missing
* returns rank 0 of 1, whatever the environment says
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
