"""Membership: members that die at any instant, come late, or do not come; the others agree, or say whom they miss.

The members are threads that take turns: one operation of the store each, in an order drawn from a seed. So a member can
die before any operation of its own, and a run never depends on the clock.
"""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minidist.comm import CommError, Group, Meter, World
from minidist.comm.handles import launch
from minidist.errors import RunError
from minidist.tools.recovery import connections
from minidist.tools.recovery import membership as membership_module
from minidist.tools.recovery.membership import Death, Membership, read_latest_generation, record_death

STEPS = 2  # of the work of a generation
MAX_TURNS = 40_000  # a run has some hundreds
LAUNCHER = -1


class Killed(BaseException):
    """Ends the thread of a member, as SIGKILL would end its process."""


class Turns:
    """Lets one thread at a time run until its next operation of the store; `draw` chooses the thread."""

    def __init__(self, draw):
        self._draw, self._changed, self._waiting, self._turn = draw, threading.Condition(), {}, None
        self.threads, self.errors, self.count = {}, {}, 0

    def start(self, name, function):
        """Start a thread that takes part; the caller has the turn."""

        def run():
            self.wait_for_turn(name)
            try:
                function()
            except Killed:
                pass
            except BaseException as error:
                self.errors[name] = error
            with self._changed:
                del self._waiting[name]
                self._pass_on()

        self._waiting[name] = True
        self.threads[name] = threading.Thread(target=run, daemon=True)
        self.threads[name].start()

    def begin(self):
        with self._changed:
            self._pass_on()

    def switch(self, name):
        """Give another thread the turn, or keep it."""
        with self._changed:
            self._pass_on()
        self.wait_for_turn(name)

    def wait_for_turn(self, name):
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == name, 60), f"{name} never had its turn"

    def _pass_on(self):
        self.count += 1
        self._turn = self._draw(sorted(self._waiting)) if self._waiting else None
        self._changed.notify_all()


class Store:
    """The operations of torch's store that the membership uses. before: called with the name of the operation."""

    def __init__(self, values, before):
        self._values, self._before = values, before

    def check(self, keys):
        self._before()
        return all(key in self._values for key in keys)

    def get(self, key):
        self._before()
        return self._values[key].encode()

    def set(self, key, value):
        self._before()
        self._values[key] = value

    def compare_set(self, key, expected, desired):
        self._before()
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values.get(key, expected).encode()


class Simulation:
    """A run of `initial` members that train `STEPS` steps in one generation; then it is over.

    deaths: for each member that dies, before which of its operations. replica: ranks of a replica, of which the mesh
    needs whole ones. max_restarts: number of replacements. late: the launcher starts replacements late.
    """

    def __init__(self, seed, deaths, initial=4, replica=1, max_restarts=4):
        draw = random.Random(seed)
        self.turns, self.values = Turns(draw.choice), {}
        self.deaths, self.initial, self.replica, self.max_restarts = dict(deaths), initial, replica, max_restarts
        self.operations, self.dead, self.generations, self.summaries = {}, [], {}, {}
        self.started = 0

    def run(self):
        for _ in range(self.initial):
            self.start_member()
        self.turns.start(LAUNCHER, self.launch)
        self.turns.begin()
        for thread in list(self.turns.threads.values()):
            thread.join(60)
        for thread in self.turns.threads.values():  # replacements too
            thread.join(60)
            assert not thread.is_alive()
        return self

    def start_member(self):
        member = self.started
        self.started += 1
        self.operations[member] = 0
        self.turns.start(member, lambda: self.train(member))

    def store(self, name):
        def before():
            self.turns.switch(name)
            assert self.turns.count < MAX_TURNS, f"the members never finish: {self.generations}"
            if name in self.operations:
                self.operations[name] += 1
                if self.operations[name] == self.deaths.get(name):
                    self.dead.append(name)
                    raise Killed

        return Store(self.values, before)

    def launch(self):
        """Record deaths and start replacements, until all members have ended."""
        store, recorded = self.store(LAUNCHER), 0
        while len(self.summaries) + len(self.dead) + len(self.turns.errors) < self.started or recorded < len(self.dead):
            store.check(["a turn of another"])
            if recorded < len(self.dead):
                member = self.dead[recorded]
                record_death(store, Death(member, 1000 + member, "killed by SIGKILL", 0.0))
                recorded += 1
                if self.started < self.initial + self.max_restarts:
                    self.start_member()

    def count_ranks(self, live):
        return min(live, self.initial) // self.replica * self.replica

    def train(self, member):
        store = self.store(member)
        members = Membership(store, member, self.initial, self.count_ranks, timeout_s=1e9)
        has_failed = False
        while (generation := members.join_next_generation(has_failed)) is not None:
            assert self.generations.setdefault(generation.number, generation) == generation
            has_failed, regroup = False, False
            for step in range(STEPS):
                key = f"step/{generation.number}/{step}"
                useful = member == generation.ranks[0] and members.is_regroup_useful()
                store.set(f"{key}/{member}", "regroup" if useful else "go on")
                while not has_failed and not all(store.check([f"{key}/{other}"]) for other in generation.ranks):
                    has_failed = members.find_lost_rank() is not None
                regroup = not has_failed and store.get(f"{key}/{generation.ranks[0]}") == b"regroup"
                if has_failed or regroup:
                    break
            if not has_failed and not regroup:
                members.end_run({"step": STEPS})
                self.summaries[member] = {"step": STEPS}
                return
        self.summaries[member] = members.summary


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(membership_module, "_POLL_S", 0.0)
    for module in (membership_module, connections):
        monkeypatch.setattr(module, "interrupt_operations", lambda open_before: None)


def check(simulation):
    """Every member that lives has the summary, and nobody raised."""
    assert simulation.turns.errors == {}
    assert set(simulation.summaries) == set(range(simulation.started)) - set(simulation.dead)
    assert simulation.summaries and all(summary == {"step": STEPS} for summary in simulation.summaries.values())
    for generation in simulation.generations.values():
        assert len(generation.ranks) == simulation.count_ranks(len(generation.members)) > 0
    return simulation


def count_operations():
    """Operations of each member in a run without deaths."""
    return check(Simulation(0, {}).run()).operations


@pytest.mark.parametrize("member", [0, 2])
def test_a_member_may_die_before_any_of_its_operations(member):
    last = count_operations()[member]
    assert last > 15
    for operation in range(1, last + 1):
        check(Simulation(operation, {member: operation}).run())


@pytest.mark.parametrize("replica", [1, 2])
def test_several_members_may_die_at_once_or_one_after_the_other(replica):
    """Replacements among them; with replicas of two ranks, some wait as spares or until the mesh can be filled."""
    sizes = set()
    for seed in range(60):
        draw = random.Random(f"{seed} deaths")
        deaths = {member: draw.randint(1, 60) for member in draw.sample(range(6), draw.randint(2, 3))}
        restarts = draw.randint(0, 4) if replica == 1 else 4  # with fewer the launcher would end the run
        simulation = check(Simulation(seed, deaths, replica=replica, max_restarts=restarts).run())
        sizes |= {len(generation.ranks) for generation in simulation.generations.values()}
    assert sizes == ({1, 2, 3, 4} if replica == 1 else {2, 4})


def test_without_replacements_the_members_left_go_on():
    simulation = check(Simulation(1, {0: 8, 3: 30}, max_restarts=0).run())
    assert sorted(simulation.summaries) == [1, 2]
    assert read_latest_generation(Store(simulation.values, lambda: None)).members == (1, 2)


def make_membership(values, member, initial=2, timeout_s=0.0, replica=1):
    return Membership(Store(values, lambda: None), member, initial, lambda n: n // replica * replica, timeout_s)


def test_a_member_that_does_not_come_is_named():
    with pytest.raises(RunError, match=r"members? 0 waited 0 s \(--comm.timeout-s\) in generation 0 for members 1, 2,"):
        make_membership({}, 0, initial=3).join_next_generation()


def test_a_mesh_that_nobody_fills_is_named():
    with pytest.raises(RunError, match="member 0 waited 0 s .* for a new member: those that live cannot fill the mesh"):
        make_membership({}, 0, initial=1, replica=2).join_next_generation()


def test_a_new_member_waits_as_long_as_the_others_work():
    """There is no place for it, so its timeout of 0 s does not count: it waits until the run is over."""
    values = {}
    first = make_membership(values, 0, initial=1)
    assert first.join_next_generation().ranks == (0,)
    turns = iter(range(200))

    def end_after_some_turns():
        if next(turns, None) is None and "summary" not in values:
            first.end_run({"step": 9})

    late = Membership(Store(values, end_after_some_turns), 1, 1, lambda live: min(live, 1), 0.0)
    assert late.join_next_generation() is None and late.summary == {"step": 9}


def test_only_a_loss_makes_the_others_leave():
    values = {}
    members = [make_membership(values, member, timeout_s=1e9) for member in range(2)]
    threads = [threading.Thread(target=one.join_next_generation) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store = Store(values, lambda: None)
    log = membership_module._arrival_log(store, 1)
    log.append({"member": 2, "has_failed": False})  # a new member
    log.append({"member": 1, "has_failed": False})  # this one goes with a step of which all know
    assert members[0].find_lost_rank() is None
    record_death(store, Death(7, 70, "killed by SIGKILL", 0.0))  # not one of these
    assert members[0].find_lost_rank() is None
    log.append({"member": 1, "has_failed": True})
    assert members[0].find_lost_rank() == "an operation of rank 1 has failed, and it has left generation 0"
    record_death(store, Death(1, 10, "killed by SIGKILL", 0.0))
    assert members[0].find_lost_rank() == "rank 1 (process 10) has died: killed by SIGKILL"


class LostOperation:
    """An operation of gloo that does not end although all connections are shut down, until the test ends it."""

    def __init__(self):
        self.end = threading.Event()

    def is_completed(self):
        return self.end.is_set()

    def wait(self):
        self.end.wait(20)


def test_an_operation_that_gloo_does_not_end_is_abandoned(monkeypatch):
    """gloo does not wake the wait for a send that had begun when the connection broke."""
    monkeypatch.setattr(connections, "_WATCH_S", 0.0)
    interruptions = []
    monkeypatch.setattr(connections, "interrupt_operations", interruptions.append)
    store = Store({}, lambda: None)
    record_death(store, Death(1, 10, "killed by SIGKILL", 0.0))
    finder = membership_module._LostRankFinder(store, membership_module.Generation(0, (0, 1), 2))
    watch = connections.LossWatch(finder.find_lost_rank)
    world = World.single()
    world.must_abandon = watch.must_abandon.is_set
    group = Group("tensor", (0, 1), 0, None, world, Meter())
    group.uses_gloo = True
    operation = LostOperation()
    watch.start()
    try:
        with pytest.raises(CommError, match=r"all_reduce .* failed: another rank has died or left, and gloo has not"):
            launch(group, "all_reduce", torch.zeros(2), lambda: operation, [])
    finally:
        operation.end.set()
        watch.stop()
    assert len(interruptions) >= connections._INTERRUPTIONS  # the operation had time to fail


def test_the_world_of_a_generation_abandons_operations_when_its_watch_does():
    member = Membership(dist.HashStore(), 0, 1, lambda live: live, timeout_s=1e9)
    member.join_next_generation()
    world = member.connect(World.single())
    assert not world.must_abandon()
    member._watch.must_abandon.set()
    assert world.must_abandon()


def abort_and_look(world):
    """Whether torch's default group of gloo is still in memory after `abort_groups` with and without `keep_s`."""
    import weakref

    from minidist.comm.world import connect_ranks
    from minidist.tools.recovery.connections import abort_groups

    is_kept = []
    for keep_s in (0.0, 600.0):
        connect_ranks("gloo", dist.HashStore(), 0, 1, world.device, 60.0)
        group = weakref.ref(dist.group.WORLD)
        abort_groups(keep_s)
        is_kept.append(group() is not None)
        assert not dist.is_initialized()
    return is_kept


def test_groups_with_operations_that_do_not_end_stay_in_memory(ranks):
    """Their destructor would wait for the operations."""
    assert ranks(abort_and_look, 1) == [[False, True]]


def test_files_of_two_devices_with_one_inode_number_differ(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(connections.os, "fstat", lambda fd: SimpleNamespace(st_dev=fd, st_ino=7))
        files = {connections._identify_file(fd) for fd in (1, 2)}
    assert len(files) == 2


def connect_after_a_failed_attempt(world, backend):
    """Rank 0 fails to connect first, because its store does; then all connect and sum."""
    from minidist.comm.world import connect_ranks
    from minidist.tools.recovery.connections import abort_groups

    class FailingStore(dist.Store):
        def set(self, key, value):
            raise dist.DistStoreError("no")

        def add(self, key, amount):
            raise dist.DistStoreError("no")

    if world.rank == 0:
        with pytest.raises(RuntimeError):
            connect_ranks(backend, FailingStore(), 0, world.size, world.device, 60.0)
    total = []
    for turn in range(2):  # and again, in the groups of another generation
        connect_ranks(backend, dist.PrefixStore(f"{turn}", world.store), world.rank, world.size, world.device, 60.0)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        total.append(tensor.tolist())
        dist.barrier()
        abort_groups()
    return total


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_whose_attempt_failed_finds_the_others(ranks, backend):
    assert ranks(connect_after_a_failed_attempt, 2, backend, backend=None) == [[[2.0, 2.0]] * 2] * 2
