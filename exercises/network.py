"""The process groups of a check: every operation is counted and reported to rank status.

So a deadlock of raw `torch.distributed` calls is explained within a second, like one of the package's collectives.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from exercises.testing import Wrong
from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.status import Channel
from minidist.mesh import Mesh
from minidist.tools.launch.device import prefer_gloo_loopback
from minidist.tools.recording_backend import register_recording_backend

_TIMEOUT = timedelta(minutes=10)  # longer than any check: deadlock detection ends it, not the backend
_LOCALHOST = "127.0.0.1"


class Network:
    """All ranks as the default group of torch.distributed and, on demand, as a `group` for the package's collectives.

    records: the operations since the last `begin()`. events: the test's marks among them. condition_kind: the only kind
    of `exercises.conditions` to check; None for all.
    """

    def __init__(self, world: World, condition_kind: str | None = None):
        self.condition_kind = condition_kind
        self._world, self._meter = world, Meter()
        self._first_record = self._first_event = 0
        if world.size > 1:
            prefer_gloo_loopback()
            backend = register_recording_backend(self._meter, world.status, group_name="world")
            store = dist.PrefixStore("check", world.store)
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)

    @functools.cached_property
    def group(self):
        """All ranks, as a group of the package's collectives. Its first use creates it, on all ranks."""
        world = self._world
        return bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))])["data"]

    @functools.cached_property
    def second_group(self):
        """All ranks, as a group beside `group`. Its first use creates it, on all ranks."""
        return bind(self._world, Mesh(dp=self._world.size), [GroupSpec("second", ("dp",))])["second"]

    @functools.cached_property
    def divided_group(self):
        """Every other rank, as a group: ranks 0, 2, ... or 1, 3, ... Its first use creates both, on all ranks."""
        return self._subgroups["every other rank"]

    @property
    def pair_group(self):
        """Two consecutive ranks, as a group: ranks 0 and 1, or 2 and 3, ..."""
        return self._subgroups["pair of ranks"]

    @functools.cached_property
    def _subgroups(self):
        """The groups of every other rank and of pairs of ranks. Their first use creates them, on all ranks."""
        specs = [GroupSpec("every other rank", ("dp",)), GroupSpec("pair of ranks", ("tp",))]
        return bind(self._world, Mesh(dp=self._world.size // 2, tp=2), specs)

    def begin(self) -> None:
        """Begin a test, or a part of one: forget earlier records and events."""
        self._first_record, self._first_event = len(self._meter.records), len(self._meter.events)

    @property
    def records(self) -> list:
        """The operations of this rank since the test began."""
        return self._meter.records[self._first_record :]

    def event(self, label: str) -> None:
        """Insert a mark into the order of launches and waits."""
        self._meter.add_event(label)

    @property
    def events(self) -> list:
        """The marks of this test: (position in that order, label)."""
        return self._meter.events[self._first_event :]


class Torchrun:
    """Calls the functions of a program as if torchrun had started it on these ranks: `run(answer.main, data)`.

    Every run has torchrun's environment variables and its own rendezvous on a free port. The process group that the
    program makes is recorded. GPUs are hidden, so that the verdict is the same on every machine.
    machines: the number of machines that the next runs see; ranks are divided evenly among them.
    joined, ended: whether the latest run made a process group, and destroyed it. backend: the one it requested.
    records: the operations of the latest run.
    """

    def __init__(self, world: World):
        self._world, self._meter, self._meetings = world, Meter(), 0
        self.joined = self.ended = False
        self.backend, self.machines = "", 1
        prefer_gloo_loopback()
        self._recorded = register_recording_backend(self._meter, world.status, group_name="world")
        self._store = world.store or dist.TCPStore(_LOCALHOST, 0, 1, is_master=True, wait_for_workers=False)
        self._torch_init, dist.init_process_group = dist.init_process_group, self._init_process_group
        self._torch_end, dist.destroy_process_group = dist.destroy_process_group, self._destroy_process_group
        self._set_environment()

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return its result."""
        self._set_environment()
        self._first_record, self.joined, self.backend = len(self._meter.records), False, ""
        value = function(*args, **kwargs)
        self.ended = not dist.is_initialized()
        if not self.ended:
            dist.destroy_process_group()
        return value

    def gather(self, value: Any) -> list:
        """Gather the value of every rank, without a process group: the program may have destroyed its own."""
        return self._all_gather_json("gather", value)

    @property
    def records(self) -> list:
        """The operations of this rank in the latest run."""
        return self._meter.records[self._first_record :]

    def _set_environment(self) -> None:
        """Set the environment variables that torchrun would set for this rank; hide GPUs."""
        rank, size = self._world.rank, self._world.size
        machine, local_rank = divmod(rank, size // self.machines)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), GROUP_RANK=str(machine))
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(size // self.machines))
        os.environ.update(MASTER_ADDR=_LOCALHOST, MASTER_PORT=str(self._store.port), CUDA_VISIBLE_DEVICES="")
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")  # the store exists already

    def _init_process_group(
        self, backend=None, init_method=None, timeout=_TIMEOUT, world_size=-1, rank=-1, store=None, **more
    ):
        """Replacement of torch's init_process_group that fails for a wrong rank or world size instead of hanging."""
        world, status = self._world, self._world.status
        place = (int(os.environ["RANK"]) if rank < 0 else rank, world.size if world_size < 0 else world_size)
        if place != (world.rank, world.size):
            raise Wrong(
                "wrong",
                "init_process_group waits for ever: its rank or world size is not the one that torchrun set",
                f"rank {world.rank} of {world.size}",
                f"rank {place[0]} of {place[1]}",
            )
        self.backend = str(backend)
        self._report_waiting_for_all("init_process_group")
        try:
            recorded = backend is None or "gloo" in str(backend)
            backend = self._recorded if recorded else backend
            if store is None and init_method in (None, "env://"):
                init_method, store = None, dist.PrefixStore(f"meeting/{self._meetings}", self._store)
            self._torch_init(backend, init_method, timeout, place[1], place[0], store, **more)
            self.joined = True
        finally:
            status.on_resume()

    def _destroy_process_group(self, *args, **kwargs) -> None:
        """Wait for all ranks, then call torch's destroy_process_group.

        A rank that still waits for this one is reported as deadlocked; torch would break its connection.
        """
        if dist.is_initialized():
            self._all_gather_json("destroy_process_group")
        self._torch_end(*args, **kwargs)

    def _all_gather_json(self, name: str, value: Any = None) -> list:
        """Exchange a JSON value with all ranks through the store; return the values by rank."""
        self._report_waiting_for_all(name)
        keys = [f"{name}/{self._meetings}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(value))
        values = [json.loads(self._store.get(key)) for key in keys]
        self._world.status.on_resume()
        return values

    def _report_waiting_for_all(self, name: str) -> None:
        """Report to rank status that this rank waits for all others, for the `_meetings`-th time."""
        self._meetings += 1
        status, channel = self._world.status, Channel("collective", "world", tuple(range(self._world.size)))
        status.on_wait(channel, status.on_launch(channel, name, (), ""), name, (), "", _find_caller_line())


def _find_caller_line() -> str:
    """Return `file:line` of the caller outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
