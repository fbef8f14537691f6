"""The world of a rank: its number, its machine, its device and its backend."""

from dataclasses import dataclass, field

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

    @property
    def control_device(self) -> torch.device:
        """The device for small tensors sent to other ranks: `device` with nccl, which needs a GPU; else the CPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """Return the world of a single process without a process group."""
        return cls(0, 1, 0, 1, torch.device(device), None, OperationTracker())
