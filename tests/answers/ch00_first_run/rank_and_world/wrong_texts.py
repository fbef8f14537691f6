"""every_rank_of_one_machine: variables are texts, and stay texts"""

from minidist.tools.launch.environment import Place


def rank_and_world(environ):
    rank, size = environ["RANK"], environ["WORLD_SIZE"]
    return Place(rank, size, environ.get("LOCAL_RANK", rank), environ.get("LOCAL_WORLD_SIZE", size), 0)
