"""refuses_what_does_not_fit: takes whatever numbers there are"""

from minidist.tools.launch.environment import Place, whole_number


def rank_and_world(environ):
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    local_rank = whole_number(environ, "LOCAL_RANK", rank)
    local_size = whole_number(environ, "LOCAL_WORLD_SIZE", size)
    return Place(rank, size, local_rank, local_size, whole_number(environ, "GROUP_RANK", 0))
