"""every_rank_of_one_machine: rank 0 of 1, whatever the launcher says"""

from minidist.tools.launch.environment import Place


def rank_and_world(environ):
    return Place(0, 1, 0, 1, 0)
