"""Membership of a run whose ranks may die and be replaced: the ranks that work together, agreed in a store.

Every process of the run is a *member*, with a number of its own that a replacement does not reuse. The members that
work together form a *generation*: an agreed list of live members. When a member dies, or a new one arrives, the others
meet in the next generation (torchelastic calls the meeting a rendezvous). The launcher serves the store and records the
deaths; the members agree among themselves, so no member is indispensable.

A generation is decided by `compare_set` on one key: several members may propose a list, and the first proposal counts.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minidist.comm.world import World
from minidist.errors import CommError, RunError

_POLL_S = 0.005
CONNECT_TIMEOUT_S = 20.0  # if a member dies while others connect to it, they may notice only after this time


@dataclass(frozen=True)
class Generation:
    """An agreed list of live members.

    number: 0, 1, ... members: ascending. The first `num_ranks` of them are the ranks, in order; the rest are spares,
    which wait for a later generation.
    """

    number: int
    members: tuple[int, ...]
    num_ranks: int


@dataclass(frozen=True)
class Death:
    """The death of a member, as the launcher recorded it. cause: "killed by SIGKILL". time_s: of `time.time`."""

    member: int
    pid: int
    cause: str
    time_s: float


def record_death(store: dist.Store, death: Death) -> None:
    """Record in the run's store that a process has died. The launcher calls it."""
    _Log(store, "deaths").append(vars(death))


def read_members(store: dist.Store) -> list[int]:
    """Return the members of the latest generation, in rank order; none before the first."""
    return json.loads(store.get(f"members/{store.get('generation').decode()}")) if store.check(["generation"]) else []


class Membership:
    """One member's view of the run.

    store: serves all members; no member hosts it. member: the number of this process. initial_members: number of
    processes that the run starts with: 0, 1, ... count_ranks: for a number of live members, how many of them the mesh
    can use as ranks; 0 if they cannot fill it. timeout_s: how long to wait for the others, in seconds.

    deaths: those recorded so far, by member.
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
        self._generation = Generation(-1, tuple(range(initial_members)), 0)
        self._death_log, self._arrival_log = _Log(store, "deaths"), _Log(store, "arrivals/0")
        self._open_before: set[int] = set()
        self.deaths: dict[int, Death] = {}

    def join_next_generation(self) -> Generation | None:
        """Meet the other live members and return the generation that all of them agree on; None if the run is over.

        Blocks until every live member of the last generation has come, and until the mesh can be filled. A spare also
        blocks while its generation works. Raises RunError if a live member does not come within the timeout.
        """
        while (generation := self._agree()) is not None:
            self._generation = generation
            self._arrival_log = _Log(self._store, f"arrivals/{generation.number + 1}")
            if self.member in generation.members[: generation.num_ranks]:
                return generation
            while self.member in generation.members and not self._arrival_log.read() and not self._is_over():
                time.sleep(_POLL_S)
        return None

    def find_dead_members(self) -> list[int]:
        """Return the members of the present generation that have died."""
        self.deaths |= {entry["member"]: Death(**entry) for entry in self._death_log.read()}
        return [member for member in self._generation.members if member in self.deaths]

    def is_regroup_useful(self) -> bool:
        """Return whether members have arrived with whom the mesh could use more ranks than it has now."""
        dead, generation = set(self.find_dead_members()), self._generation
        live = (set(self._arrival_log.read()) | set(generation.members)) - dead - set(self.deaths)
        return self._count_ranks(len(live)) > generation.num_ranks

    def end(self, summary: dict[str, Any]) -> None:
        """Declare the run over, so that members that are not ranks return. summary: what they return (JSON)."""
        self._store.set("summary", json.dumps(summary))

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of a run that is over."""
        return json.loads(self._store.get("summary"))

    def connect(self, world: World) -> World:
        """Create torch's default process group over the ranks of the present generation; return this rank's world.

        world: of this process, as it was started. Raises CommError if a member dies meanwhile.
        """
        generation, size = self._generation, self._generation.num_ranks
        rank = generation.members.index(self.member)
        store = _GenerationStore(dist.PrefixStore(f"generation/{generation.number}/", self._store), self)
        world = replace(
            world,
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            backend=world.backend if size > 1 else None,
            store=store,
        )
        self._open_before = _list_open_files()
        world.status.reset_channels()  # the operations of this generation are numbered from 1 on all ranks
        if size == 1:
            return world
        try:
            dist.init_process_group(
                world.backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                device_id=world.device if world.backend == "nccl" else None,
            )
        except (RuntimeError, IndexError) as error:
            raise CommError(f"the ranks of generation {generation.number} could not connect: {error}") from error
        return world

    def disconnect(self) -> None:
        """Abort all process groups of this process, without the other ranks; their pending operations fail too.

        nccl's communicators are aborted together (`ncclCommAbort`), shm leaves its groups. gloo has no abort: its
        connections are shut, which are those opened since `connect`.
        """
        shut_down_connections(lambda sock: os.fstat(sock.fileno()).st_ino in self._open_before)
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _agree(self) -> Generation | None:
        """Announce this member for the next generation and wait for the list; None if the run is over."""
        number = max(self._latest_generation(), self._generation.number) + 1
        if number != self._generation.number + 1:  # this member was started later, or was left out
            members = json.loads(self._store.get(f"members/{number - 1}"))
            self._generation = Generation(number - 1, tuple(members), 0)
        arrivals, key = _Log(self._store, f"arrivals/{number}"), f"members/{number}"
        arrivals.append(self.member)
        end_s = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if self._is_over():
                return None
            missing = set(self._generation.members) - set(arrivals.read()) - set(self.find_dead_members())
            live = sorted(set(arrivals.read()) - set(self.deaths))
            if not missing and self._count_ranks(len(live)):
                self._store.compare_set(key, "", json.dumps(live))
                break
            if time.monotonic() > end_s:
                raise RunError(
                    f"recovery failed: after {self._timeout_s:g} s (--comm.timeout-s), processes {sorted(missing)} "
                    f"live and do not answer, and {len(live)} are ready."
                )
            time.sleep(_POLL_S)
        members = tuple(json.loads(self._store.get(key)))
        self._store.set("generation", str(number))
        return Generation(number, members, self._count_ranks(len(members)))

    def _latest_generation(self) -> int:
        return int(self._store.get("generation")) if self._store.check(["generation"]) else -1

    def _is_over(self) -> bool:
        return self._store.check(["summary"])


def shut_down_connections(is_kept: Callable[[socket.socket], bool]) -> None:
    """Shut the TCP connections of this process, so that operations of gloo that wait for a peer fail, here and there.

    is_kept: which connections not to shut.
    """
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # not a socket, or closed by now
            continue
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                if not is_kept(sock):
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it only listens: without its socket, gloo would abort the process
            pass
        finally:
            sock.detach()


def _list_open_files() -> set[int]:
    """Return the inodes of the open files of this process, sockets among them."""
    inodes = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            inodes.add(os.fstat(fd).st_ino)
    return inodes


class _Log:
    """An append-only list in a store. Several members may append at once."""

    def __init__(self, store: dist.Store, name: str):
        self._store, self._name, self._entries = store, name, []

    def append(self, value: Any) -> None:
        at = self._store.add(f"{self._name}/count", 1)
        self._store.set(f"{self._name}/{at}", json.dumps(value))

    def read(self) -> list[Any]:
        """Return all entries so far."""
        while self._store.check([key := f"{self._name}/{len(self._entries) + 1}"]):
            self._entries.append(json.loads(self._store.get(key)))
        return self._entries


class _GenerationStore(dist.Store):
    """A store for the process groups of one generation: waiting for a key fails once a member of it has died.

    torch creates a process group by exchanging addresses through a store, and would wait for those of a dead rank.
    """

    def __init__(self, store: dist.Store, membership: Membership):
        super().__init__()
        self._store, self._membership = store, membership

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if dead := self._membership.find_dead_members():
                raise dist.DistStoreError(f"member {dead[0]} has died")
            if end_s is not None and time.monotonic() > end_s:
                raise dist.DistStoreError(f"no other rank has set {keys[0]} in {timeout}")
            time.sleep(_POLL_S / 5)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=CONNECT_TIMEOUT_S))
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]
