"""Latency and bandwidth between the ranks of this machine, compared with plain copies in memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minidist.comm import collectives
from minidist.comm.group import GroupSpec, bind
from minidist.comm.world import World
from minidist.mesh import Mesh
from minidist.simple.collectives import exchange
from minidist.tools.shm.group import ShmGroup

SMALL, LARGE = 4, 64 * 2**20  # bytes of float32
TURNS = 3


@dataclass(frozen=True)
class LinkSpeed:
    """Measured times of messages, all-reduces and copies: medians of the slowest rank, in seconds.

    small_..., large_...: on tensors of SMALL bytes and of `large_bytes` bytes (see `measure_link_speed`). To time a
    message, every rank sends one to the next rank at the same time. copy_s: a plain copy of a large tensor by all ranks
    at once, the limit of the memory. shared_memory: whether the ranks communicate through the shm backend.
    """

    small_message_s: float
    large_message_s: float
    small_all_reduce_s: float
    large_all_reduce_s: float
    copy_s: float
    shared_memory: bool


def measure_link_speed(world: World, large_bytes: int = LARGE, repeats: int = TURNS) -> LinkSpeed:
    """Time messages, all-reduces and plain copies on all ranks at once; return the same on all ranks. Collective.

    large_bytes: size of the large tensors. repeats: how often each case is timed, after one warm-up.
    """
    group = bind(world, Mesh(dp=world.size), [GroupSpec("links", ("dp",))])["links"]
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    small, small_other = (torch.zeros(SMALL // 4, device=world.device) for _ in range(2))
    whole, other = (torch.zeros(large_bytes // 4, device=world.device) for _ in range(2))
    calls: dict[str, tuple[int, Callable[[], object]]] = {  # calls per turn, and the call
        "small_message_s": (20, lambda: exchange(group, send=(small, right), recv=(small_other, left))),
        "large_message_s": (1, lambda: exchange(group, send=(whole, right), recv=(other, left))),
        "small_all_reduce_s": (20, lambda: collectives.all_reduce(small, group)),
        "large_all_reduce_s": (1, lambda: collectives.all_reduce(whole, group)),
        "copy_s": (1, lambda: other.copy_(whole)),
    }
    times = torch.zeros(len(calls), repeats, dtype=torch.float64)
    for turn in range(-1, repeats):  # one warm-up turn is not counted
        for row, (calls_per_turn, call) in enumerate(calls.values()):
            collectives.barrier(group, async_op=True).wait(host=True)
            start_s = time.perf_counter()
            for _ in range(calls_per_turn):
                call()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                times[row, turn] = (time.perf_counter() - start_s) / calls_per_turn
    times = times.to(world.control_device)
    collectives.all_reduce(times, group, "max")  # a call has ended when it has ended on all ranks
    medians = map(statistics.median, times.tolist())
    return LinkSpeed(**dict(zip(calls, medians, strict=True)), shared_memory=isinstance(group.process_group, ShmGroup))
