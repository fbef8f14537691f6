"""Membership of a run whose ranks may die and be replaced: the ranks that work together, agreed in a store.

Every process of the run is a *member*, with a number of its own that a replacement does not reuse. The members that
work together form a *generation*: an agreed list of live members. When a member dies, or a new one arrives, the others
meet in the next generation (torchelastic calls the meeting a rendezvous). The launcher serves the store and records the
deaths; the members agree among themselves, so no member is indispensable.

The protocol, from generation N to N + 1:

1. A member announces itself for generation N + 1 and says whether an operation of generation N failed on it.
2. It waits until each member of generation N has announced itself or is recorded as dead, and until the announced
   live members can fill the mesh. Then it proposes them. The list is one key of the store, set by `compare_set`: the
   first proposal counts, and all members read that one.
3. The listed members connect. A live member that is not listed, because it arrived too late, begins again for
   generation N + 2; so does a spare, for which the mesh has no place, when a rank announces itself or dies.

Why it ends, whenever a member dies:

* Nothing is published in two halves. An entry of a log and a list of members are one `compare_set` each, so a member
  that dies has either published it or not. (A counter raised before its entry is written would leave a hole behind
  which no reader looks.)
* Step 2 waits only for live members of generation N. Such a member is not held up by generation N: a thread of each
  rank (`LossWatch`) looks for deaths and failed announcements of its generation, and makes this rank's operations
  fail, so it comes too. An operation that gloo does not end even so is abandoned (`World.must_abandon`). Where the
  thread cannot reach (gloo while it connects two ranks), CONNECT_TIMEOUT_S does.
* A proposed member may have died unrecorded. Then connecting fails, and generation N + 2 begins without it. Each such
  turn uses up a death, and there are finitely many members.
* The first rank that completes the run publishes its summary; members that meet after that return.
* If a live member does not come (it is stopped, say), the wait ends `timeout_s` after the last arrival or death with an
  error that names who waits for whom. The launcher then ends all processes.

Without deadline a member waits only while generation N works, and has no place for it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minidist.comm.world import World, connect_ranks
from minidist.errors import CommError, RunError
from minidist.tools.recovery.connections import LossWatch, abort_groups, interrupt_operations

_POLL_S = 0.005
CONNECT_TIMEOUT_S = 20.0  # of gloo's connections: if a member dies just then, the others notice only after this time


@dataclass(frozen=True)
class Generation:
    """The members (live processes) that have agreed to train together until one dies or a new one arrives.

    number: 0 for the first generation, then 1, ... members: their numbers, ascending. The first `num_ranks` members are
    the ranks, in order; the rest are spares, which wait for a later generation.
    """

    number: int
    members: tuple[int, ...]
    num_ranks: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members that are ranks, in rank order: element r is the member with rank r."""
        return self.members[: self.num_ranks]


@dataclass(frozen=True)
class Death:
    """The death of a member (a process of the run), as the launcher recorded it.

    member: the member's number. cause: such as "killed by SIGKILL". time_s: Unix time of the death.
    """

    member: int
    pid: int
    cause: str
    time_s: float


def record_death(store: dist.Store, death: Death) -> None:
    """Write the death of a process into the run's store, for all members to read. The launcher calls it."""
    _Log(store, "deaths").append(vars(death))


def read_latest_generation(store: dist.Store) -> Generation | None:
    """Return the latest generation (list of live processes) that the members agreed on; None before the first."""
    number = int(store.get("generation")) if store.check(["generation"]) else -1  # a late writer may have set it back
    while store.check([f"members/{number + 1}"]):
        number += 1
    return None if number < 0 else _read_generation(store, number)


def is_connected(store: dist.Store, generation: Generation) -> bool:
    """Return whether all ranks of a generation have created their process groups, and none has left the generation."""
    count = store.add(f"connected/{generation.number}", 0)
    return count == generation.num_ranks and not _arrival_log(store, generation.number + 1).read()


class Membership:
    """Agrees with the other processes of a run, through a store, on which of them are ranks when some die or arrive.

    A process of the run is a member; the members that train together form a `Generation`. store: the launcher serves
    it. member: the number of this process. initial_members: how many processes the run starts with. count_ranks:
    returns how many of a number of live members the mesh can use as ranks; 0 if they cannot fill it. timeout_s: how
    long to wait for a live member, in seconds. Attribute: deaths, those recorded so far, by member.
    """

    def __init__(
        self,
        store: dist.Store,
        member: int,
        initial_members: int,
        count_ranks: Callable[[int], int],
        timeout_s: float,
    ):
        self.member, self._store, self._count_ranks, self._timeout_s = member, store, count_ranks, timeout_s
        self._generation = Generation(-1, tuple(range(initial_members)), initial_members)
        self._death_log, self._arrivals = _Log(store, "deaths"), _arrival_log(store, 0)
        self._finder: _LostRankFinder | None = None
        self._watch: LossWatch | None = None
        self.deaths: dict[int, Death] = {}

    def join_next_generation(self, has_failed: bool = False) -> Generation | None:
        """Meet the other live members and return the generation that all of them agree on; None if the run is over.

        has_failed: whether an operation of the present generation failed on this rank, so that the others must leave it
        too. Blocks until every live member of the present generation has come, and until the mesh can be filled. A
        member that becomes a spare blocks until it is a rank. Raises RunError if a live member does not come within the
        timeout.
        """
        while (generation := self._agree(has_failed)) is not None:
            self.disconnect(has_failed=False)  # all ranks have left the last generation, also if no operation failed
            self._generation, has_failed = generation, False
            self._arrivals = _arrival_log(self._store, generation.number + 1)
            if self.member in generation.ranks:
                self._finder = _LostRankFinder(self._store, generation)
                self._watch = LossWatch(self._finder.find_lost_rank)
                return generation
            while self.member in generation.members and not self._is_ending() and not self._is_over():
                time.sleep(_POLL_S)
        return None

    def find_dead_members(self) -> list[int]:
        """Return the numbers of the processes of the present generation that have died, as the launcher recorded it."""
        self.deaths |= {entry["member"]: Death(**entry) for entry in self._death_log.read()}
        return [member for member in self._generation.members if member in self.deaths]

    def find_lost_rank(self) -> str | None:
        """Describe a rank that has died, or left the process groups after a failure, as text; None if there is none.

        If there is such a rank, the present generation (see `Generation`) cannot continue. Only one rank of the
        generation may call this.
        """
        return self._finder.find_lost_rank()

    def is_regroup_useful(self) -> bool:
        """Return whether enough new processes have arrived that the mesh can use more ranks than now."""
        self.find_dead_members()
        live = (self._find_arrivals() | set(self._generation.members)) - set(self.deaths)
        return self._count_ranks(len(live)) > self._generation.num_ranks

    def end_run(self, summary: dict[str, Any]) -> None:
        """Declare the run complete, so that spares stop waiting and return `summary`, which must be JSON."""
        self._store.compare_set("summary", "", json.dumps(summary))
        self._watch.stop()

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of a completed run, as a rank passed it to `end_run`."""
        return json.loads(self._store.get("summary"))

    def connect(self, world: World) -> World:
        """Collective: create torch's default process group over the ranks of this generation; return this rank's world.

        world: of this process, as it was started. Raises CommError if a rank dies or leaves meanwhile. Afterwards a
        thread watches the ranks: if one dies or leaves, this rank's pending operations fail, or are abandoned.
        """
        generation, size = self._generation, self._generation.num_ranks
        rank = generation.ranks.index(self.member)
        store = _GenerationStore(dist.PrefixStore(f"generation/{generation.number}/", self._store), self._finder)
        backend = world.backend if size > 1 else None
        world = replace(world, rank=rank, size=size, local_rank=rank, local_size=size, backend=backend, store=store)
        world.must_abandon = self._watch.must_abandon.is_set
        world.status.reset_channels()  # the operations of this generation are numbered from 1 on all ranks
        if size == 1:
            return world
        self._watch.start()
        try:
            connect_ranks(world.backend, store, rank, size, world.device, CONNECT_TIMEOUT_S)
        except (RuntimeError, IndexError) as error:
            raise CommError(f"the ranks of generation {generation.number} could not connect: {error}") from error
        self._store.add(f"connected/{generation.number}", 1)
        return world

    def disconnect(self, has_failed: bool = True) -> None:
        """Destroy all process groups of this process without waiting for the other ranks; pending operations fail.

        has_failed: whether an operation has failed, so that gloo may not end the others before their timeout.
        """
        if self._watch is not None:
            self._watch.stop()
            interrupt_operations(self._watch.open_before)
            self._watch = None
        abort_groups(self._timeout_s if has_failed else 0.0)

    def _agree(self, has_failed: bool) -> Generation | None:
        """Announce this member for the next generation and wait for the list; None if the run is over."""
        latest = read_latest_generation(self._store)
        if latest is not None and latest.number > self._generation.number:  # it was started later, or was left out
            self._generation = latest
        number = self._generation.number + 1
        key = f"members/{number}"
        self._arrivals = _arrival_log(self._store, number)
        self._arrivals.append({"member": self.member, "has_failed": has_failed})
        known, end_s = None, 0.0
        while not self._store.check([key]):
            if self._is_over():
                return None
            self.find_dead_members()
            arrived, deaths = self._find_arrivals(), set(self.deaths)
            live, missing = sorted(arrived - deaths), set(self._generation.members) - arrived - deaths
            if not missing and (num_ranks := self._count_ranks(len(live))):
                self._store.compare_set(key, "", json.dumps([live, num_ranks]))
                continue
            if known != (known := (len(arrived), len(deaths))):
                end_s = time.monotonic() + self._timeout_s
            elif time.monotonic() > end_s and self._is_ending():
                raise RunError(self._describe_wait(number, live, missing))
            time.sleep(_POLL_S)
        self._store.set("generation", str(number))
        return _read_generation(self._store, number)

    def _find_arrivals(self) -> set[int]:
        """Return the members that have announced themselves for the next generation."""
        return {entry["member"] for entry in self._arrivals.read()}

    def _is_ending(self) -> bool:
        """Return whether a rank of the present generation has died, or announced itself for the next one."""
        return bool({*self.find_dead_members(), *self._find_arrivals()}.intersection(self._generation.ranks))

    def _is_over(self) -> bool:
        return self._store.check(["summary"])

    def _describe_wait(self, number: int, live: list[int], missing: Iterable[int]) -> str:
        late = (
            f"{_name_members(missing)}, which did not come although the launcher has seen no end of it"
            if missing
            else "a new member: those that live cannot fill the mesh"
        )
        return (
            f"recovery failed: {_name_members(live)} waited {self._timeout_s:g} s (--comm.timeout-s) in generation "
            f"{number} for {late}."
        )


class _LostRankFinder:
    """Looks for ranks of a generation that have died, or left it after a failure: it cannot go on then."""

    def __init__(self, store: dist.Store, generation: Generation):
        self._ranks, self._number = generation.ranks, generation.number
        self._deaths, self._arrivals = _Log(store, "deaths"), _arrival_log(store, generation.number + 1)

    def find_lost_rank(self) -> str | None:
        """Return which rank has died or failed, as a sentence; None if none has. Any thread may call it."""
        for death in self._deaths.read():
            if death["member"] in self._ranks:
                return f"rank {self._ranks.index(death['member'])} (process {death['pid']}) has died: {death['cause']}"
        for arrival in self._arrivals.read():
            if arrival["has_failed"] and arrival["member"] in self._ranks:
                rank = self._ranks.index(arrival["member"])
                return f"an operation of rank {rank} has failed, and it has left generation {self._number}"
        return None


def _arrival_log(store: dist.Store, number: int) -> "_Log":
    return _Log(store, f"arrivals/{number}")


def _read_generation(store: dist.Store, number: int) -> Generation:
    members, num_ranks = json.loads(store.get(f"members/{number}"))
    return Generation(number, tuple(members), num_ranks)


def _name_members(members: Iterable[int]) -> str:
    numbers = sorted(members)
    return f"member{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


class _Log:
    """An append-only list in a store. Several members may append at once, and several threads may read."""

    def __init__(self, store: dist.Store, name: str):
        self._store, self._name, self._entries, self._lock = store, name, [], threading.Lock()

    def append(self, value: Any) -> None:
        """Append a value that differs from all others. One operation publishes it, so it is there or it is not."""
        text = json.dumps(value)
        while self._store.compare_set(f"{self._name}/{len(self.read())}", "", text).decode() != text:
            pass  # another member has taken this place

    def read(self) -> list[Any]:
        """Return all entries so far."""
        with self._lock:
            while self._store.check([key := f"{self._name}/{len(self._entries)}"]):
                self._entries.append(json.loads(self._store.get(key)))
            return self._entries


class _GenerationStore(dist.Store):
    """A store for the process groups of one generation: reading it fails once a rank of it has died or failed.

    torch creates a process group by exchanging addresses through a store, and would wait for those of a dead rank.
    """

    def __init__(self, store: dist.Store, finder: _LostRankFinder):
        super().__init__()
        self._store, self._finder = store, finder

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=CONNECT_TIMEOUT_S)) -> None:
        end_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise dist.DistStoreError(f"no other rank has set {keys[0]} in {timeout}")
            time.sleep(_POLL_S / 5)

    def get(self, key: str) -> bytes:
        """Wait for the key; return its value."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        if loss := self._finder.find_lost_rank():
            raise dist.DistStoreError(loss)
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]
