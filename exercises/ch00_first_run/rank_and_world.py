"""Read a process's rank from its environment.

Write the missing lines of rank_and_world; the docstring says what is asked.
You may call: whole_number, Place, UserError.
Check it with: python -m exercises check rank_and_world

Stub ad74ae83.
"""

from collections.abc import Mapping

from minidist.errors import UserError
from minidist.tools.launch.environment import Place, whole_number


def rank_and_world(environ: Mapping[str, str]) -> Place:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK tell.

    Without LOCAL_RANK or LOCAL_WORLD_SIZE all ranks are on one machine, where they are RANK and WORLD_SIZE; without
    GROUP_RANK this is the first machine.
    Raises UserError when RANK or WORLD_SIZE is missing, one is no whole number, or they do not fit together.
    """
    raise NotImplementedError("return this rank's assignment; raise UserError for contradictory numbers")
