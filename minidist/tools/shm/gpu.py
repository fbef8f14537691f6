"""Which group carries the tensors of GPUs: nccl, or this one through the memory of the host."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from minidist.tools.shm.staged import Staged

SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"  # nccl reads it when it makes a communicator, in src/init.cc from 2.30 on
FIRST = (2, 30)


def gpu_card() -> dict:
    """What the other ranks must know of this one: its GPU, the nccl that is loaded, and if sharing is switched off.

    The version is asked of the library itself: another than torch was built with may have been loaded in its place.
    """
    there = dist.is_nccl_available()
    return {
        "gpu": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
        "nccl": list(torch.cuda.nccl.version()) if there else [],
        "off": os.environ.get(SWITCH) == "0",
    }


def gpu_group(
    cards: Sequence[Mapping], rank: int, here: dist.ProcessGroup, make_nccl: Callable[[], dist.ProcessGroup]
) -> "dist.ProcessGroup | Staged":
    """The group for tensors on GPUs, the same on every rank. cards: `gpu_card` of each; here: the group for the CPU.

    nccl where every rank has a GPU of its own, and where several share one and nccl allows that; else `here`, which
    copies to pinned memory of the host and back. Rank 0 says so.
    """
    oldest = min(tuple(card["nccl"]) for card in cards)
    shared = len({card["gpu"] for card in cards}) < len(cards)
    if oldest and not shared:
        return make_nccl()
    if oldest[:2] >= FIRST and not any(card["off"] for card in cards):
        os.environ[SWITCH] = "1"
        return make_nccl()
    if rank == 0:
        print(f"backend shm: {_reason(oldest)}; they talk through pinned memory", file=sys.stderr, flush=True)
    return Staged(here)


def _reason(oldest: tuple[int, ...]) -> str:
    if not oldest:
        return "the ranks have GPUs and no nccl"
    version = ".".join(map(str, oldest))
    if oldest[:2] >= FIRST:
        return f"the ranks share a GPU, and {SWITCH}=0 forbids that to nccl {version}"
    return f"the ranks share a GPU, which nccl {version} refuses ({FIRST[0]}.{FIRST[1]} is the first that can)"
