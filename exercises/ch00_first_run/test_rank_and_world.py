"""Tests of rank_and_world: environments as torchrun would leave them, and some that nobody should."""

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
    """The environment of every rank on machines with so many ranks each, and the place it tells."""
    for node, local_size in enumerate(machines):
        for local in range(local_size):
            place = (sum(machines[:node]) + local, sum(machines), local, local_size, node)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
            yield Environment(**dict(zip(names, map(str, place), strict=True))), place


def expect_place(got, expected):
    """What came back is a RankEnvironment with these numbers."""
    if got is None:
        raise Wrong("type", "nothing came back: is there a `return`?", "a RankEnvironment", "None")
    if not all(hasattr(got, name) for name in NAMES):
        raise Wrong("type", "the result has the wrong type", "a RankEnvironment", repr(got)[:80])
    for name, wanted in zip(NAMES, expected, strict=True):
        expect(name, getattr(got, name), wanted)


def refused(answer, variable, **values):
    """The call must raise UserError, with a message that names the variable."""
    try:
        got = answer.rank_and_world(Environment(**values))
    except UserError as error:
        if variable not in str(error):
            raise Wrong("wrong", f"the message must name {variable}", f"... {variable} ...", str(error)[:80]) from None
        return
    raise Wrong("wrong", "this cannot be, and must be refused with UserError", "UserError", repr(got)[:80])


@test(points=3)
def every_rank_of_one_machine(answer):
    """Each of four ranks on one machine finds its place."""
    for environ, place in torchrun(4):
        expect_place(answer.rank_and_world(environ), place)


@test(points=2)
def every_rank_of_three_machines(answer):
    """On several machines the rank and the local rank are not the same, whether the machines are equal or not."""
    for machines in ((2, 2, 2), (2, 3, 1)):
        for environ, place in torchrun(*machines):
            expect_place(answer.rank_and_world(environ), place)


@test(points=1)
def without_local_variables(answer):
    """A launcher that sets RANK and WORLD_SIZE only has started all ranks on one machine."""
    for rank in range(3):
        environ = Environment(RANK=str(rank), WORLD_SIZE="3")
        expect_place(answer.rank_and_world(environ), (rank, 3, rank, 3, 0))


@test(points=2)
def refuses_what_is_missing_or_no_number(answer):
    """Without RANK or WORLD_SIZE, or with nonsense in one of them, the message names it."""
    refused(answer, "RANK", WORLD_SIZE="2")
    refused(answer, "WORLD_SIZE", RANK="0")
    refused(answer, "RANK", RANK="first", WORLD_SIZE="2")
    refused(answer, "RANK", RANK="-1", WORLD_SIZE="2")
    refused(answer, "LOCAL_WORLD_SIZE", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1.5")


@test(points=2)
def refuses_what_does_not_fit(answer):
    """Rank 2 of 2 cannot be, nor can a machine have more ranks than there are."""
    refused(answer, "WORLD_SIZE", RANK="2", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    refused(answer, "WORLD_SIZE", RANK="0", WORLD_SIZE="0")
    refused(answer, "LOCAL_RANK", RANK="2", WORLD_SIZE="4", LOCAL_RANK="2", LOCAL_WORLD_SIZE="2")
    refused(answer, "LOCAL_WORLD_SIZE", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
