"""The world of a rank: its number, its machine, its device and its backend."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from minidist.comm.status import OperationTracker


@dataclass
class World:
    """The environment of one rank; the first argument of every function that runs on ranks.

    rank, size: this rank's number and the number of ranks. local_rank, local_size: the same among the ranks of this
    machine; node_rank: number of the machine. device: the device on which this rank computes. backend: torch's name of
    the default process group's backend; None without a process group, as for a single rank by default. status: this
    rank's report of its operations, which deadlock detection reads. store: the torch store that ranks started by the
    rank server use for their process groups; under torchrun, a store that outlives restarts of the ranks; else None.
    member: the number of this process in a run whose ranks are replaced when they die (`tools/recovery`); else None.
    must_abandon: in such a run, returns whether this rank must abandon its pending operations because another rank has
    died or left; else None.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    status: OperationTracker
    node_rank: int = 0
    store: dist.Store | None = field(default=None, repr=False)  # its own repr asks the name service, for seconds
    member: int | None = None
    must_abandon: Callable[[], bool] | None = field(default=None, repr=False)

    @property
    def control_device(self) -> torch.device:
        """The device of small control messages between ranks: `device` with nccl, which needs a GPU; else the CPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """Return the world of a single process without a process group."""
        return cls(0, 1, 0, 1, torch.device(device), None, OperationTracker())


def connect_ranks(
    backend: str, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> None:
    """Collective: create torch's default process group. May be called again after it failed or the group was destroyed.

    store: the rendezvous store of all ranks, without keys of an earlier group. timeout_s: seconds until the backend
    aborts an operation.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # The keys of a group in the store contain a count of this process's groups, which a failed attempt has
        # increased: ranks with different counts would wait for each other under different keys.
        dist.distributed_c10d._world.group_count = 0
    timeout = timedelta(seconds=timeout_s)
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
