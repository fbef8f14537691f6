"""without_local_variables (raised): fails when the launcher sets no local variables"""

from minidist.errors import UserError
from minidist.tools.launch.environment import Place, whole_number


def rank_and_world(environ):
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    local_rank = whole_number(environ, "LOCAL_RANK")
    local_size = whole_number(environ, "LOCAL_WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {size}")
    if local_rank >= local_size:
        raise UserError(f"LOCAL_RANK {local_rank} is not below LOCAL_WORLD_SIZE {local_size}")
    if local_size > size:
        raise UserError(f"LOCAL_WORLD_SIZE {local_size} is above WORLD_SIZE {size}")
    return Place(rank, size, local_rank, local_size, whole_number(environ, "GROUP_RANK", 0))
