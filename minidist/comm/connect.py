"""Connecting the ranks of a run: torch's default process group, which `group.bind` needs."""

from datetime import timedelta

import torch
import torch.distributed as dist


def connect_ranks(
    backend: str, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> None:
    """Create torch's default process group; also after this process has left an earlier one, or failed to connect.

    store: the rendezvous store that all ranks share, without keys of an earlier group. device: of this rank.
    timeout_s: of each operation, in seconds. Raises what torch raises if a rank does not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # The key of a group in the store contains a count of this process's groups, which a failed attempt has
        # increased: ranks with different counts would wait for each other under different keys.
        dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )


def abort_groups() -> None:
    """Leave all process groups without waiting for the other ranks; nccl's communicators are aborted together."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
