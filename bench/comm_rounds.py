"""What runs on every rank of `python -m bench comm`: the same operations on gloo and on shm, in turns."""

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.workload import Share, Workload
from minidist.comm import World

BACKENDS = ("gloo", "shm")
KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
LARGE = 4 * MIB  # from here on reduce-scatter, all-gather and transfers are measured too
COPY = "copy"
Case = tuple[str, int]  # operation and bytes of the whole tensor
Span = tuple[float, float, float]  # start and end on the clock that all ranks share, CPU time of all threads, in s

# torch 2.13 renamed these two; the old names warn from then on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def operations(world: World, rounds: int, sizes: tuple[int, ...]) -> dict[tuple[str, int, str], list[Span]]:
    """Time every case on every backend, `rounds` times in turns; a span is that of `repeats(bytes)` operations.

    Besides, a plain copy of each size by all ranks at once, as (COPY, bytes, "memory").
    """
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    calls: dict[tuple[str, int, str], Callable[[], object]] = {}
    for size in sizes:
        for (name, backend), call in _calls(world, size, groups).items():
            calls[name, size, backend] = call
    spans: dict[tuple[str, int, str], list[Span]] = {key: [] for key in calls}
    gc.disable()
    for turn in range(-1, rounds):  # the first is for warming up
        for key, call in calls.items():
            count = repeats(key[1])
            dist.barrier(groups["gloo"])
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            for _ in range(count):
                call()
            if turn >= 0:
                spans[key].append((begin_s, time.monotonic(), time.process_time() - begin_cpu_s))
    return spans


def repeats(size: int) -> int:
    """Operations of one turn: so many that the ranks' unequal starts do not count."""
    return max(1, min(100, 8 * MIB // size))


def _calls(world: World, size: int, groups: dict[str, dist.ProcessGroup]) -> dict[tuple[str, str], Callable]:
    n, rank, calls = size // 4, world.rank, {}
    whole, part, other = torch.zeros(n), torch.zeros(n // world.size), torch.zeros(n)
    cut = whole[: len(part) * world.size]
    for backend, group in groups.items():
        calls["all_reduce", backend] = lambda group=group: dist.all_reduce(whole, group=group)
        if size >= LARGE:
            calls["reduce_scatter", backend] = lambda group=group: _reduce_scatter(part, cut, group=group)
            calls["all_gather", backend] = lambda group=group: _all_gather(cut, part, group=group)
            calls["send_recv", backend] = lambda group=group: _pair(whole, rank, world.size, group)
    calls[COPY, "memory"] = lambda: other.copy_(whole)
    return calls


def _pair(tensor: Tensor, rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Even ranks send to the next, which receive; a last one without a partner looks on."""
    if rank % 2:
        dist.recv(tensor, rank - 1, group=group)
    elif rank + 1 < size:
        dist.send(tensor, rank + 1, group=group)


def steps(world: World, rounds: int, per_round: int, work: Workload) -> tuple[dict, dict[str, list[float]]]:
    """Spans of `per_round` steps of torch's DDP and FSDP2 on both backends, by (wrapper, backend); and their losses."""
    shares = work.batches(world.rank, world.size)
    control = dist.new_group(backend="gloo")
    trained = {}
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        trained["DDP", backend] = _Trained(work, DistributedDataParallel(work.build(), process_group=group), world.size)
        trained["FSDP2", backend] = _Trained(work, _sharded(work.build(), group), world.size)
    spans: dict[tuple[str, str], list[Span]] = {key: [] for key in trained}
    losses: dict[str, list[float]] = {" ".join(key): [] for key in trained}
    for turn in range(-1, rounds):
        for key, one in trained.items():
            gc.collect()
            dist.barrier(control)
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            for i in range(per_round):
                losses[" ".join(key)].append(one.step(shares[((turn + 1) * per_round + i) % len(shares)]))
            if turn >= 0:
                spans[key].append((begin_s, time.monotonic(), time.process_time() - begin_cpu_s))
    return spans, losses


def _sharded(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Trained:
    """A wrapped model and its optimizer."""

    def __init__(self, work: Workload, model: nn.Module, size: int):
        self.model, self.size = model, size
        self.optimizer = work.adamw(model.parameters())

    def step(self, share: Share) -> float:
        loss_sum, _ = self.model(share.batch.tokens, share.batch.labels)
        loss = loss_sum / share.global_count
        (loss * self.size).backward()  # the wrappers average over the ranks
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
