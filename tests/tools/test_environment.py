"""Rank, world size and node of a process from the launcher's environment variables."""

import pytest

from minidist.errors import UserError
from minidist.tools.launch.environment import rank_and_world, read_integer

VARIABLES = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}


def test_ranks_are_read_from_the_environment():
    assert rank_and_world(VARIABLES) == (5, 8, 1, 4, 1)


def test_without_local_numbers_there_is_one_machine():
    assert rank_and_world({"RANK": "2", "WORLD_SIZE": "3"}) == (2, 3, 2, 3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set; start with torchrun"),
        ({"RANK": ""}, "RANK is ''"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "1.0"}, "RANK is '1.0'"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE 8; the rank must be less"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK \(or RANK .*\) is 4 and LOCAL_WORLD_SIZE \(or WORLD_SIZE\) 4"),
        ({"LOCAL_RANK": None}, r"LOCAL_RANK \(or RANK without it\) is 5 and LOCAL_WORLD_SIZE \(or WORLD_SIZE\) 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9 and WORLD_SIZE 8"),
        ({"WORLD_SIZE": "0"}, "RANK is 5 and WORLD_SIZE 0"),
    ],
)
def test_inconsistent_environments_are_refused(change, message):
    environ = {name: value for name, value in (VARIABLES | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        rank_and_world(environ)


def test_a_default_stands_for_what_is_not_set_and_for_nothing_else():
    assert read_integer({}, "LOCAL_RANK", 3) == 3 and read_integer({"LOCAL_RANK": "2"}, "LOCAL_RANK", 3) == 2
    with pytest.raises(UserError, match="LOCAL_RANK is 'two'"):
        read_integer({"LOCAL_RANK": "two"}, "LOCAL_RANK", 3)
