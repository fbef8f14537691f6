"""Processes that train together although any of them may die: the rendezvous in which the living processes meet.

For programs that recover by themselves, with `minidist.simple.recovery.recover`: the death of a process ends no other
process. The processes are forks of this one, so nothing is pickled and nothing is imported twice.
"""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from minidist.comm import Group, Meter, World
from minidist.comm.status import OperationTracker
from minidist.comm.world import connect_ranks
from minidist.tools.launch.device import prefer_gloo_loopback
from minidist.tools.launch.parent_death import die_with_parent
from minidist.tools.recovery.connections import LossWatch, abort_groups, interrupt_operations, list_open_files

_HOST = "127.0.0.1"
_TIMEOUT_S = 60.0  # of an operation between two living ranks
_POLL_S = 0.05  # after which a process that another thread has started is served as well
Rendezvous = Callable[[Group | None], Group]


class ElasticRanks:
    """Processes that form process groups again and again: a process that has died is missing in the next group.

    function: called in each process as `function(number, rendezvous)`; processes are numbered from 0. rendezvous(group)
    closes all connections with the other members of `group`, unless it is None, waits until every living process has
    called it, and returns their new process group: gloo on this machine, ranks in the order of their numbers. When a
    process dies, the pending operations of the others in its group fail. size: the number of processes to start now.
    on_group: called in this process with the member numbers of each new group, before the group forms; a process that
    `on_group` starts joins the next group.

    groups: the member numbers of every group so far. values: for each number, the value that the process has returned.
    dead: the numbers of the processes that ended without returning.
    """

    def __init__(
        self,
        function: Callable[[int, Rendezvous], Any],
        size: int,
        on_group: Callable[[list[int]], None] | None = None,
    ):
        self._function, self._on_group = function, on_group
        self._processes: dict[int, multiprocessing.Process] = {}
        self._pipes: dict[int, Connection] = {}
        self._waiting: set[int] = set()
        self._store: dist.Store | None = None
        self.groups: list[list[int]] = []
        self.values: dict[int, Any] = {}
        self.dead: list[int] = []
        for _ in range(size):
            self.start_process()

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each process that still runs, by its number (0, 1, ...)."""
        return {number: self._processes[number].pid for number in list(self._pipes)}

    @property
    def processes_in_rendezvous(self) -> list[int]:
        """The numbers of the processes that have called the rendezvous and wait for the other processes."""
        return sorted(self._waiting)

    def start_process(self) -> int:
        """Start one more process, which joins the next group; return its number: 0, 1, ... in the order of starts."""
        number = len(self._processes)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(self._function, number, theirs), daemon=True
        )
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._processes[number], self._pipes[number] = process, ours
        return number

    def serve(self, quiet_s: float = 60.0) -> Iterator[tuple[int, Any]]:
        """Form process groups until all processes have ended; yield (number, value) of each process that returns.

        A group forms whenever all living processes have called the rendezvous. Raises TimeoutError if for `quiet_s`
        seconds no process has called the rendezvous, returned or died.
        """
        quiet_for = 0.0
        while self._pipes:
            ready = wait(list(self._pipes.values()), _POLL_S)
            quiet_for = 0.0 if ready else quiet_for + _POLL_S
            if quiet_for > quiet_s:
                waiting = self.processes_in_rendezvous
                raise TimeoutError(f"processes {sorted(self._pipes)} do not end; {waiting} wait in the rendezvous")
            for number, pipe in list(self._pipes.items()):
                if pipe in ready and self._receive(number, pipe):
                    yield number, self.values[number]
            if self._pipes and self._waiting == self._pipes.keys():
                self._form_group()
        self._store = None

    def kill_process(self, number: int) -> None:
        """Kill the process with this number (0, 1, ...) by SIGKILL; do not wait for its end."""
        os.kill(self._processes[number].pid, signal.SIGKILL)

    def __enter__(self) -> "ElasticRanks":
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the processes that are left."""
        for process in self._processes.values():
            process.kill()
            process.join()
        self._store = None  # a later fork would abort when it collects a store whose thread it does not have

    def _receive(self, number: int, pipe: Connection) -> bool:
        """Receive what a process has sent; return whether it was its value."""
        try:
            kind, value = pipe.recv()
        except EOFError:  # the process has ended
            pipe.close()
            del self._pipes[number]
            self._waiting.discard(number)
            if number not in self.values:
                self.dead.append(number)
                if self.groups and number in self.groups[-1]:
                    self._store.set(_lost_key(len(self.groups)), str(number))
            return False
        if kind == "meet":
            self._waiting.add(number)
        else:
            self.values[number] = pickle.loads(value)
        return kind != "meet"

    def _form_group(self) -> None:
        if self._store is None:
            self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        members = self.processes_in_rendezvous
        self.groups.append(members)
        self._waiting.clear()
        pipes = [self._pipes[number] for number in members]
        if self._on_group:
            self._on_group(members)
        for rank, pipe in enumerate(pipes):
            pipe.send((len(self.groups), rank, len(members), self._store.port))


def _lost_key(group_number: int) -> str:
    """The key of the store that says that a process of this group has died."""
    return f"lost from group {group_number}"


def _run(function: Callable, number: int, pipe: Connection) -> None:
    die_with_parent(os.getppid())
    prefer_gloo_loopback()
    kept_files = list_open_files()
    watches: list[LossWatch] = []  # of the group that this process is in

    def rendezvous(group: Group | None) -> Group:
        if group is not None and group.process_group is not None:
            watches.pop().stop()
            # Of all groups, also those that `function` has made and still refers to: a peer may wait in any of them.
            interrupt_operations(kept_files)
            abort_groups(_TIMEOUT_S)
        pipe.send(("meet", None))
        return _connect(*pipe.recv(), watches)

    # Plain pickle copies the elements of a tensor; the pipe itself would send a file that ends with this process.
    pipe.send(("end", pickle.dumps(function(number, rendezvous))))


def _connect(group_number: int, rank: int, size: int, port: int, watches: list[LossWatch]) -> Group:
    """Connect with the other members of a group, and append the watch of these connections to `watches`."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo" if size > 1 else None, OperationTracker())
    if size > 1:
        store, watched_store = (dist.TCPStore(_HOST, port, is_master=False) for _ in range(2))
        watch = LossWatch(lambda: "a process has died" if watched_store.check([_lost_key(group_number)]) else None)
        world.must_abandon = watch.must_abandon.is_set
        watches.append(watch)
        connect_ranks("gloo", dist.PrefixStore(f"group {group_number}", store), rank, size, world.device, _TIMEOUT_S)
        watch.start()
    process_group = dist.group.WORLD if size > 1 else None
    return Group("data", tuple(range(size)), rank, process_group, world, Meter())
