"""The rank's side of `python -m bench comm`: time operations and training steps on gloo and shm in turns."""

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.workload import RankBatch, Workload
from minidist.comm import World

BACKENDS = ("gloo", "shm")
KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
# Reduce-scatter, all-gather and send/recv are measured from this size on.
LARGE = 4 * MIB
COPY = "copy"
# Start and end on the machine's monotonic clock, and CPU time of all threads of this rank, in seconds.
Timing = tuple[float, float, float]

# torch 2.13 renamed these two and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def time_operations(world: World, rounds: int, sizes: tuple[int, ...]) -> dict[tuple[str, int, str], list[Timing]]:
    """Time every operation on every backend, once per round, by (operation, bytes of the full tensor, backend).

    A timing covers `repetitions(bytes)` operations. A plain copy of each size by all ranks at once has the key (COPY,
    bytes, "memory").
    """
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    operations: dict[tuple[str, int, str], Callable[[], object]] = {}
    for size in sizes:
        for (name, backend), operation in _make_operations(world, size, groups).items():
            operations[name, size, backend] = operation
    timings: dict[tuple[str, int, str], list[Timing]] = {key: [] for key in operations}
    gc.disable()
    for number in range(-1, rounds):  # round -1 warms up
        for key, operation in operations.items():
            count = repetitions(key[1])
            dist.barrier(groups["gloo"])
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            for _ in range(count):
                operation()
            if number >= 0:
                timings[key].append((start_s, time.monotonic(), time.process_time() - start_cpu_s))
    return timings


def repetitions(size: int) -> int:
    """Return how often an operation of `size` bytes runs per timing: enough to hide the ranks' unequal starts."""
    return max(1, min(100, 8 * MIB // size))


def _make_operations(world: World, size: int, groups: dict[str, dist.ProcessGroup]) -> dict[tuple[str, str], Callable]:
    """Make the operations on tensors of `size` bytes, by (operation, backend)."""
    n, rank, operations = size // 4, world.rank, {}
    full, shard, copy = torch.zeros(n), torch.zeros(n // world.size), torch.zeros(n)
    divisible = full[: len(shard) * world.size]
    for backend, group in groups.items():
        operations["all_reduce", backend] = lambda group=group: dist.all_reduce(full, group=group)
        if size >= LARGE:
            operations["reduce_scatter", backend] = lambda group=group: _reduce_scatter(shard, divisible, group=group)
            operations["all_gather", backend] = lambda group=group: _all_gather(divisible, shard, group=group)
            operations["send_recv", backend] = lambda group=group: _send_to_next(full, rank, world.size, group)
    operations[COPY, "memory"] = lambda: copy.copy_(full)
    return operations


def _send_to_next(tensor: Tensor, rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Send from every even rank to the next rank; a last rank without a partner does nothing."""
    if rank % 2:
        dist.recv(tensor, rank - 1, group=group)
    elif rank + 1 < size:
        dist.send(tensor, rank + 1, group=group)


def time_steps(
    world: World, rounds: int, steps: int, work: Workload
) -> tuple[dict[tuple[str, str], list[Timing]], dict[str, list[float]]]:
    """Time `steps` training steps of torch DDP and FSDP2 per round on both backends.

    Returns the timings by (wrapper, backend), and the losses of all steps by "wrapper backend".
    """
    batches = work.rank_batches(world.rank, world.size)
    control = dist.new_group(backend="gloo")
    trainers = {}
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        ddp = DistributedDataParallel(work.build_model(), process_group=group)
        trainers["DDP", backend] = _Trainer(work, ddp, world.size)
        trainers["FSDP2", backend] = _Trainer(work, _apply_fsdp2(work.build_model(), group), world.size)
    timings: dict[tuple[str, str], list[Timing]] = {key: [] for key in trainers}
    losses: dict[str, list[float]] = {" ".join(key): [] for key in trainers}
    for number in range(-1, rounds):  # round -1 warms up
        for key, trainer in trainers.items():
            gc.collect()
            dist.barrier(control)
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            for i in range(steps):
                losses[" ".join(key)].append(trainer.step(batches[((number + 1) * steps + i) % len(batches)]))
            if number >= 0:
                timings[key].append((start_s, time.monotonic(), time.process_time() - start_cpu_s))
    return timings, losses


def _apply_fsdp2(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Apply torch's fully_shard to every layer and to the model, over `group`."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Trainer:
    """A wrapped model and its optimizer."""

    def __init__(self, work: Workload, model: nn.Module, size: int):
        self.model, self.size = model, size
        self.optimizer = work.build_adamw(model.parameters())

    def step(self, batch: RankBatch) -> float:
        """Train one step on this rank's batch; return the rank's part of the global mean loss."""
        loss_sum, _ = self.model(batch.batch.tokens, batch.batch.labels)
        loss = loss_sum / batch.global_token_count
        (loss * self.size).backward()  # DDP and FSDP2 average gradients over the ranks
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
