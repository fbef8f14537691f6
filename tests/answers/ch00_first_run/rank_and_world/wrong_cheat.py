"""every_rank_of_one_machine: the package's own function under the learner's name"""

from minidist.tools.launch import environment


def rank_and_world(environ):
    return environment.rank_and_world(environ)
