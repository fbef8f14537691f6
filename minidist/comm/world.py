"""What one rank knows of its place among the others."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from minidist.comm.status import RankStatus


@dataclass
class World:
    """The first argument of every function that runs on ranks.

    rank, size: among all ranks. local_rank, local_size: among those of this machine; node_rank: which machine.
    device: where this rank computes. backend: of the default process group; None when there is no process group, which
    is so for one rank unless the caller asked for one.
    status: where this rank reports its operations. store: where ranks meet to make groups, on ranks of the rank server.
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
        """Where small tensors for other ranks are made: nccl takes those of a GPU only, gloo takes few from a GPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """The world of a process on its own."""
        return cls(0, 1, 0, 1, torch.device(device), None, RankStatus())
