"""Tests of rank_and_world: environments as torchrun sets them, and contradictory ones."""

from collections.abc import Mapping

from exercises.testing import Wrong, expect, test
from minidist.errors import UserError

NAMES = ("rank", "size", "local_rank", "local_size", "node_rank")


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
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
            yield Environment(**dict(zip(names, map(str, numbers), strict=True))), numbers


def expect_numbers(got, expected):
    """Check that the result is a RankEnvironment with these numbers."""
    if got is None:
        raise Wrong("type", "the result is None: is there a `return`?", "a RankEnvironment", "None")
    if not all(hasattr(got, name) for name in NAMES):
        raise Wrong("type", "the result has the wrong type", "a RankEnvironment", repr(got)[:80])
    for name, wanted in zip(NAMES, expected, strict=True):
        expect(name, getattr(got, name), wanted)


def expect_refusal(answer, variable, **values):
    """The call must raise UserError, with a message that names the variable."""
    try:
        got = answer.rank_and_world(Environment(**values))
    except UserError as error:
        if variable not in str(error):
            raise Wrong("wrong", f"the message must name {variable}", f"... {variable} ...", str(error)[:80]) from None
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
    for machines in ((2, 2, 2), (2, 4, 1)):
        for environ, numbers in torchrun(*machines):
            expect_numbers(answer.rank_and_world(environ), numbers)


@test(points=1)
def without_local_variables(answer):
    """If only RANK and WORLD_SIZE are set, all ranks are on one machine; each missing variable has its own default."""
    for rank in range(3):
        environ = Environment(RANK=str(rank), WORLD_SIZE="3")
        expect_numbers(answer.rank_and_world(environ), (rank, 3, rank, 3, 0))
    environ = Environment(RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", GROUP_RANK="3")
    expect_numbers(answer.rank_and_world(environ), (1, 4, 1, 2, 3))
    environ = Environment(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0")
    expect_numbers(answer.rank_and_world(environ), (2, 4, 0, 4, 0))


@test(points=2)
def refuses_missing_and_invalid_variables(answer):
    """If a variable is missing or not a valid number, the message names the variable."""
    expect_refusal(answer, "RANK", WORLD_SIZE="2")
    expect_refusal(answer, "WORLD_SIZE", RANK="0")
    expect_refusal(answer, "RANK", RANK="first", WORLD_SIZE="2")
    expect_refusal(answer, "RANK", RANK="-1", WORLD_SIZE="2")
    expect_refusal(answer, "LOCAL_WORLD_SIZE", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1.5")
    expect_refusal(answer, "LOCAL_RANK", RANK="0", WORLD_SIZE="2", LOCAL_RANK="", LOCAL_WORLD_SIZE="2")
    expect_refusal(answer, "GROUP_RANK", RANK="0", WORLD_SIZE="2", GROUP_RANK="first")


@test(points=2)
def refuses_contradictory_variables(answer):
    """Contradictions are refused: rank 2 of 2, or more ranks on a machine than in the world."""
    expect_refusal(answer, "WORLD_SIZE", RANK="2", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    expect_refusal(answer, "WORLD_SIZE", RANK="0", WORLD_SIZE="0")
    expect_refusal(answer, "LOCAL_RANK", RANK="2", WORLD_SIZE="4", LOCAL_RANK="2", LOCAL_WORLD_SIZE="2")
    expect_refusal(answer, "LOCAL_WORLD_SIZE", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
