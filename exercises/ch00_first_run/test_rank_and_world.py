"""Tests of rank_and_world: environments as torchrun sets them, and contradictory ones."""

import itertools
import re
from collections.abc import Mapping

from exercises.testing import Wrong, expect, test
from minidist.errors import UserError
from minidist.tools.launch.environment import RankEnvironment

NAMES = ("rank", "size", "local_rank", "local_size", "node_rank")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# Variables of torchrun and other launchers from which nothing is to be read.
OTHERS = {"MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "9", "ROLE_RANK": "8", "NODE_RANK": "7", "SLURM_LOCALID": "6"}


class Environment(Mapping):
    """Variables, with a short name in messages."""

    def __init__(self, **values):
        self._values = values

    def __getitem__(self, name):
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __repr__(self):
        return str(self._values)


def torchrun(*machines):
    """Yield the environment of every rank and its numbers; machines: the number of ranks of each machine."""
    for node, local_size in enumerate(machines):
        for local in range(local_size):
            numbers = (sum(machines[:node]) + local, sum(machines), local, local_size, node)
            yield Environment(**dict(zip(VARIABLES, map(str, numbers), strict=True)), **OTHERS), numbers


def expect_numbers(got, expected):
    """Check that the result is a RankEnvironment with these numbers."""
    if got is None:
        raise Wrong("type", "the result is None: is there a `return`?", "a RankEnvironment", "None")
    if type(got) is not RankEnvironment:
        raise Wrong("type", "the result has the wrong type", "a RankEnvironment", repr(got)[:80])
    for name, wanted in zip(NAMES, expected, strict=True):
        value = getattr(got, name)
        if type(value) is not int:
            raise Wrong("type", f"{name} must be an integer", "an int", type(value).__name__)
        expect(name, value, wanted)


def expect_refusal(answer, *variables, **values):
    """The call must raise UserError, with a message that names one of these variables."""
    try:
        got = answer.rank_and_world(Environment(**values))
    except UserError as error:
        if not any(re.search(rf"(?<![A-Z_]){variable}(?![A-Z_])", str(error)) for variable in variables):
            name = " or ".join(variables)
            raise Wrong("wrong", f"the message must name {name}", f"... {variables[0]} ...", str(error)[:80]) from None
        return
    raise Wrong(
        "wrong",
        "invalid variables must raise UserError",
        "UserError",
        repr(got)[:80],
    )


@test(points=3)
def every_rank_of_one_machine(answer):
    """Each of four ranks on one machine gets its own numbers."""
    for environ, numbers in torchrun(4):
        expect_numbers(answer.rank_and_world(environ), numbers)


@test(points=2)
def every_rank_of_three_machines(answer):
    """On several machines, with equal or different numbers of ranks, rank and local rank differ."""
    for machines in ((2, 2, 2), (2, 4, 1), (8, 12)):
        for environ, numbers in torchrun(*machines):
            expect_numbers(answer.rank_and_world(environ), numbers)


@test(points=1)
def without_local_variables(answer):
    """If only RANK and WORLD_SIZE are set, all ranks are on one machine; each missing variable has its own default."""
    for rank in range(3):
        for others in {}, OTHERS:
            environ = Environment(RANK=str(rank), WORLD_SIZE="3", **others)
            expect_numbers(answer.rank_and_world(environ), (rank, 3, rank, 3, 0))
    environ = Environment(RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", GROUP_RANK="3")
    expect_numbers(answer.rank_and_world(environ), (1, 4, 1, 2, 3))
    environ = Environment(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0")
    expect_numbers(answer.rank_and_world(environ), (2, 4, 0, 4, 0))
    environ = Environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    expect_numbers(answer.rank_and_world(environ), (5, 8, 1, 4, 0))


@test(points=2)
def refuses_missing_and_invalid_variables(answer):
    """If a variable is missing or not a valid number, the message names the variable."""
    expect_refusal(answer, "RANK", WORLD_SIZE="2")
    expect_refusal(answer, "WORLD_SIZE", RANK="0")
    valid = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for variable in VARIABLES:
        for text in ("first", "-1", "1.5", ""):
            expect_refusal(answer, variable, **valid | {variable: text})
            expect_refusal(answer, variable, **{"RANK": "0", "WORLD_SIZE": "2", variable: text})


@test(points=2)
def refuses_contradictory_variables(answer):
    """Contradictions are refused, and only these: rank 2 of 2, or more ranks on a machine than in the world."""
    ranks, sizes, optional = range(4), range(5), (None, 0, 1, 2)
    for numbers in itertools.product(ranks, sizes, optional, (*optional, 3), (None, 1)):
        rank, size, local_rank, local_size, node = numbers
        values = {name: str(number) for name, number in zip(VARIABLES, numbers, strict=True) if number is not None}
        local_rank, local_size = (
            (rank if local_rank is None else local_rank),
            (size if local_size is None else local_size),
        )
        contradictory = [("RANK", "WORLD_SIZE")] * (rank >= size)
        contradictory += [VARIABLES[:4]] * (local_rank >= local_size)
        contradictory += [("LOCAL_WORLD_SIZE", "WORLD_SIZE")] * (local_size > size)
        if contradictory:
            expect_refusal(answer, *dict.fromkeys(itertools.chain(*contradictory)), **values)
        elif 0 <= rank - local_rank <= size - local_size:  # the machines before this one have the lower ranks
            environ = Environment(**values)
            expect_numbers(answer.rank_and_world(environ), (rank, size, local_rank, local_size, node or 0))
