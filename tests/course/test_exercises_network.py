"""The environment of a checked program: torchrun's variables, recorded groups, and measured scenarios."""

import pytest

from exercises.stuck_ranks import find_stuck_ranks
from minidist.errors import RunError

SCENARIOS = '''
import torch
import torch.distributed as dist

RANKS = {"nobody": 2, "all_but_one": 3, "one_raises": 2, "a_late_one": 3}


def nobody(rank):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


def all_but_one(rank):
    if rank != 2:
        dist.barrier()


def one_raises(rank):
    raise ValueError("no scenario")


def a_late_one(rank):
    """Ranks 0 and 1 are stuck long before rank 2, which waits for them, has begun to wait."""
    if rank < 2:
        dist.recv(torch.empty(1), 1 - rank)
    sum(number for number in range(10_000_000))
    dist.recv(torch.empty(1), 0)
'''


def place(run):
    """The environment that a program finds in a rank."""
    import os

    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    dist.init_process_group("gloo")
    found = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    return {name: os.environ[name] for name in names}, found


def program_under_torchrun(world):
    """Two runs of one program that ends no group, and then one that makes none."""
    from exercises.network import Torchrun

    run = Torchrun(world)
    first, second = run(place, run), run(place, run)
    facts = [first, second, run.joined, run.ended]
    run(int)
    return [*facts, run.joined, run.ended, run.gather(world.rank * 10)]


def two_machines(world):
    """Where a program finds itself when its ranks are on two machines, and the backend that it asked for."""
    import os

    from exercises.network import Torchrun

    run = Torchrun(world)
    before = run.backend
    run.machines = 2
    run(place, run)
    asked = run.backend
    run(int)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK", "WORLD_SIZE")
    return [os.environ[name] for name in names], (before, asked, run.backend)


@pytest.mark.parametrize("size", [1, 3])
def test_a_program_finds_torchruns_environment(ranks, size):
    results = ranks(program_under_torchrun, size, backend=None)
    ports = set()
    for rank, (first, second, joined, ended, joined_later, ended_later, gathered) in enumerate(results):
        environ, found = first
        assert first == second and found == (rank, size, "recorded")
        assert environ["RANK"] == environ["LOCAL_RANK"] == str(rank)
        assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == str(size)
        assert (joined, ended, joined_later, ended_later) == (True, False, False, True)
        assert gathered == [other * 10 for other in range(size)]
        ports.add(environ["MASTER_PORT"])
    assert len(ports) == 1 and int(ports.pop()) >= 1024


def test_a_program_can_run_as_on_two_machines(ranks):
    for rank, (environ, backends) in enumerate(ranks(two_machines, 4, backend=None)):
        assert environ == [str(rank % 2), "2", str(rank // 2), str(rank), "4"]
        assert backends == ("", "gloo", "")


def recorded_traffic(world):
    """The meter's records of raw calls and of the package's collectives."""
    import torch
    import torch.distributed as dist

    from exercises.network import Network
    from minidist.comm import all_reduce

    network = Network(world)
    dist.all_reduce(torch.ones(3))
    all_reduce(torch.ones(5), network.group)
    before = [(record.name, record.shape) for record in network.records]
    network.begin()
    return before, network.records


def test_raw_calls_and_collectives_are_both_recorded(ranks):
    for before, after in ranks(recorded_traffic, 2, backend=None):
        assert before == [("all_reduce", (3,)), ("all_reduce", (5,))] and not after


@pytest.fixture
def scenarios(tmp_path):
    file = tmp_path / "scenarios.py"
    file.write_text(SCENARIOS)
    return file


def test_a_deadlock_measurement_needs_every_rank_waiting(server, scenarios):
    measured = find_stuck_ranks(scenarios, ["nobody", "all_but_one", "a_late_one"], server)
    assert measured == {"nobody": [], "all_but_one": [0, 1], "a_late_one": [0, 1, 2]}


def test_a_scenario_that_fails_is_no_measurement(server, scenarios):
    with pytest.raises(
        RunError, match="the scenario one_raises neither ended nor was blocked for ever on all its 2 ranks"
    ):
        find_stuck_ranks(scenarios, ["nobody", "one_raises"], server)
