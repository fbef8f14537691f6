"""The world of a rank: its number, its machine, its device and its backend."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from minidist.comm.status import RankStatus


@dataclass
class World:
    """The environment of one rank; the first argument of every function that runs on ranks.

    rank, size: among all ranks. local_rank, local_size: among the ranks of this machine; node_rank: number of the
    machine. device: the device on which this rank computes. backend: that of the default process group; None without a
    process group, as for a single rank by default. status: receives the operations of this rank. store: rendezvous
    store for new groups, on ranks of the rank server.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    status: RankStatus
    node_rank: int = 0
    store: dist.Store | None = field(default=None, repr=False)  # its own repr asks the name service, for seconds

    @property
    def control_device(self) -> torch.device:
        """The device of small tensors sent to other ranks: nccl needs a GPU, gloo supports few GPU operations."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """Return the world of a single process without a process group."""
        return cls(0, 1, 0, 1, torch.device(device), None, RankStatus())
