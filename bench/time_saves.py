"""Time checkpoints of the same state on every rank: a plain copy, `CheckpointSaver`, and torch's DCP."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bench.peak_memory import PeakResidentMemory
from minidist.checkpoint.save import CheckpointSaver, save_checkpoint
from minidist.checkpoint.shards import TensorShard
from minidist.comm import GroupSpec, Meter, World, all_reduce, bind, bind_all_gather_object
from minidist.mesh import Mesh
from minidist.parameters import Box

TENSOR_NUMEL = 2**22  # 16 MiB in float32, as a matrix of 2048 x 2048
COPY, BACKGROUND = "plain copy", "minidist background"
CONTENDERS = (COPY, BACKGROUND, "minidist", "torch DCP async_save", "torch DCP save")

# For each round and contender: seconds that training waits, seconds until the state is on disk, peak growth in bytes.
Timing = tuple[float, float, int]


def time_saves(world: World, rounds: int, state_bytes: int, folder: str) -> list[dict[str, Timing]]:
    """Save `state_bytes` of float32 tensors, divided over the ranks, with every contender in turn, `rounds` times.

    folder: on the disk to measure; emptied after each save. Every rank starts each save at the same time.
    """
    count = max(1, state_bytes // 4 // TENSOR_NUMEL // world.size)
    state = {f"rank{world.rank}.{i}": torch.randn(TENSOR_NUMEL) for i in range(count)}
    group = bind(world, Mesh(dp=world.size), [GroupSpec("ranks", ("dp",))], meter=Meter(keep=False))["ranks"]
    root = Path(folder)
    with contextlib.closing(CheckpointSaver(root, bind_all_gather_object(group), world.rank)) as saver:
        run = _make_contenders(world, state, root, saver)
        timings = []
        for round_number in range(rounds + 1):  # the first warms up
            one_round = {}
            for name in _rotate(CONTENDERS, round_number):
                all_reduce(torch.zeros(1), group)
                one_round[name] = _time_save(run[name], saver.host_copy_bytes if name == BACKGROUND else 0)
                all_reduce(torch.zeros(1), group)
                if world.rank == 0:
                    shutil.rmtree(root, ignore_errors=True)
                    root.mkdir()
                all_reduce(torch.zeros(1), group)
            timings.append(one_round)
    return timings[1:]


def _make_contenders(
    world: World, state: dict[str, Tensor], root: Path, saver: CheckpointSaver
) -> dict[str, Callable[[], Callable[[], object] | None]]:
    """Return the contenders by name: each starts a save and returns what waits for its end, or None if it is done."""
    copies = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    shards = [
        TensorShard(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor) for name, tensor in state.items()
    ]
    gloo = dist.new_group(backend="gloo")

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    def background() -> Callable[[], object]:
        saver.start_save(1, shards, {})
        return saver.finish_save

    def foreground() -> None:
        save_checkpoint(root, 1, shards, {}, saver.all_gather_object, world.rank)

    def dcp_async() -> Callable[[], object]:
        return dcp.async_save(state, checkpoint_id=root / "dcp", process_group=gloo).result

    def dcp_save() -> None:
        dcp.save(state, checkpoint_id=root / "dcp", process_group=gloo)

    return dict(zip(CONTENDERS, (copy, background, foreground, dcp_async, dcp_save), strict=True))


def _time_save(start: Callable[[], Callable[[], object] | None], kept_bytes: int) -> Timing:
    """Time one save. kept_bytes: memory that the contender allocated in an earlier save and still uses."""
    with PeakResidentMemory() as memory:
        before = memory.bytes
        begin = time.perf_counter()
        wait = start()
        stalled = time.perf_counter()
        if wait is not None:
            wait()
        end = time.perf_counter()
    return stalled - begin, end - begin, (memory.bytes or 0) - (before or 0) + kept_bytes


def _rotate(names: tuple[str, ...], by: int) -> Iterator[str]:
    """Yield the names beginning with another one in each round, so that none profits from its place."""
    return (names[(i + by) % len(names)] for i in range(len(names)))
