"""every_rank_of_one_machine: rank 0 of 4, as in the script that everyone copies"""

from minidist.tools.launch.environment import Place


def rank_and_world(environ):
    return Place(0, 4, 0, 4, 0)
