"""Compare random operations on `shm` with gloo, and kill ranks in the middle of operations; the suite runs a few.

To run many: `python -m tests.helpers.shm_trials random --count 10000 --seed 0`, or `kill --count 50`.
"""

import argparse
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from minidist.comm import World
from minidist.tools.launch import RankServer

KINDS = (
    "all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_list", "gather", "scatter",
    "reduce_scatter", "all_to_all", "transfer", "transfer", "coalesced", "barrier",
)  # fmt: skip
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
IN_FLIGHT = 6


@dataclass(frozen=True)
class Step:
    """One operation, the same object on every rank."""

    kind: str
    group: int
    numel: int
    dtype: torch.dtype
    op: str
    root: int
    peer: int
    tag: int
    wait: bool
    seed: int


def draw_steps(seed: int, count: int, groups: list[tuple[int, ...]]) -> list[Step]:
    """`count` operations drawn from `seed`. Most tensors are small, some larger than a slot of shared memory."""
    draw = random.Random(seed)
    steps = []
    for i in range(count):
        which = draw.randrange(len(groups))
        root, peer = draw.sample(range(len(groups[which])), 2)
        numel = draw.choice((0, 1, draw.randrange(2, 100), draw.randrange(100, 5000), draw.randrange(5000, 400_000)))
        kind, dtype = draw.choice(KINDS), draw.choice(DTYPES)
        op = "sum" if kind in ("reduce_scatter", "reduce") else draw.choice(["sum", "sum", *OPS])
        steps.append(
            Step(kind, which, numel, dtype, op, root, peer, draw.randrange(3), draw.random() < 0.5, seed * 100_000 + i)
        )
    return steps


def draw_values(step: Step, rank: int, numel: int, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step.seed * 64 + rank * 4 + salt)
    if step.dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(step.dtype)
    return torch.randint(-50, 50, (numel,), generator=generator, dtype=step.dtype)


def launch(step: Step, group: dist.ProcessGroup, rank: int, size: int, ranks: tuple[int, ...]):
    """Start the operation. Returns (works, tensors whose values must agree with gloo's)."""
    n, options = step.numel, {"group": group, "async_op": True}
    mine, root = draw_values(step, rank, n), ranks[step.root]
    empty = torch.zeros(0, dtype=step.dtype)
    parts = [torch.full((n,), 7, dtype=step.dtype) for _ in range(size)]
    match step.kind:
        case "all_reduce":
            return [dist.all_reduce(mine, op=OPS[step.op], **options)], [mine]
        case "coalesced":
            both = [mine, draw_values(step, rank, n // 2 + 1, 1)]
            return [dist.all_reduce_coalesced(both, op=OPS[step.op], **options)], both
        case "reduce":
            return [dist.reduce(mine, root, op=OPS[step.op], **options)], [mine if rank == step.root else empty]
        case "broadcast":
            return [dist.broadcast(mine, root, **options)], [mine]
        case "all_gather":
            whole = torch.empty(n * size, dtype=step.dtype)
            return [dist.all_gather_into_tensor(whole, mine, **options)], [whole]
        case "all_gather_list":
            return [dist.all_gather(parts, mine, **options)], parts
        case "gather":
            here = rank == step.root
            return [dist.gather(mine, parts if here else None, dst=root, **options)], parts if here else []
        case "scatter":
            parts = [draw_values(step, rank, n, 1 + i % 3) for i in range(size)] if rank == step.root else None
            return [dist.scatter(mine, parts, src=root, **options)], [mine]
        case "reduce_scatter":
            whole = draw_values(step, rank, n * size)
            return [dist.reduce_scatter_tensor(mine, whole, op=OPS[step.op], **options)], [mine]
        case "all_to_all":
            sent = [(step.seed + 3 * rank + 5 * i) % 7 * (n // 50 + 1) for i in range(size)]
            received = [(step.seed + 3 * i + 5 * rank) % 7 * (n // 50 + 1) for i in range(size)]
            out = torch.zeros(sum(received), dtype=step.dtype)
            return [dist.all_to_all_single(out, draw_values(step, rank, sum(sent)), received, sent, **options)], [out]
        case "transfer":
            if rank == step.root:
                return [dist.isend(mine, ranks[step.peer], group=group, tag=step.tag)], []
            if rank == step.peer:
                return [dist.irecv(mine, root, group=group, tag=step.tag)], [mine]
            return [], []
        case "barrier":
            return [dist.barrier(**options)], []
    raise ValueError(step.kind)


def tolerance(step: Step, size: int) -> float:
    """The largest allowed difference of one element: the order of addition differs, (N - 1) eps sum|x|, |x| < 6."""
    exact = not step.dtype.is_floating_point or size == 2 or step.op in ("max", "min")
    if exact or step.kind not in ("all_reduce", "coalesced", "reduce", "reduce_scatter"):
        return 0.0
    bound = 6.0 * size if step.op == "sum" else 6.0**size
    return (size - 1) * torch.finfo(step.dtype).eps * bound


def compare_with_gloo(world: World, seed: int, count: int, copies: int = 1) -> int:
    """Run random steps on shm, several in flight, and then on gloo; return how many tensors were compared.

    copies: how many groups of each set of ranks exist; with three, most groups have to borrow memory.
    """
    everyone = tuple(range(world.size))
    sets = [everyone, everyone, tuple(sorted({0, world.size - 1})), everyone[:2]] * copies
    shm, gloo = ([dist.new_group(list(ranks), backend=name) for ranks in sets] for name in ("shm", "gloo"))
    compared, in_flight = 0, []

    def land(some: list) -> None:
        nonlocal compared
        for step, works, result in some:
            for work in works:
                timed = step.seed % 2 and isinstance(work, dist.Work)  # a coalesced operation returns a future
                work.wait(timedelta(seconds=30)) if timed else work.wait()
            ranks = sets[step.group]
            works, expected = launch(step, gloo[step.group], ranks.index(world.rank), len(ranks), ranks)
            for work in works:
                work.wait()
            for a, b in zip(result, expected, strict=True):
                limit = tolerance(step, len(ranks))
                same = torch.equal(a, b) if not limit else ((a.double() - b.double()).abs() <= limit).all()
                assert same, f"{step} on rank {world.rank}: {a} is not {b}"
                compared += 1

    for step in draw_steps(seed, count, sets):
        ranks = sets[step.group]
        if world.rank not in ranks:
            continue
        in_flight.append((step, *launch(step, shm[step.group], ranks.index(world.rank), len(ranks), ranks)))
        if step.wait or len(in_flight) >= IN_FLIGHT:
            land(in_flight)
            in_flight = []
    land(in_flight)
    return compared


def work_until_killed(rank: int, size: int, victim: int, seed: int, folder: Path) -> None:
    """Run collectives and transfers until rank `victim` kills itself; the others write down when they noticed."""
    dist.init_process_group("shm", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    draw = random.Random(seed)
    last = draw.randrange(5, 60)
    tensor = torch.ones(draw.choice((10, 5000, 3_000_000)))
    right, left = (rank + 1) % size, (rank - 1) % size
    try:
        for i in range(1_000_000):
            pending = dist.all_reduce(tensor, async_op=True)
            if i == last and rank == victim:
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            pending.wait()
            ops = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, tensor.clone(), left)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            tensor.fill_(1)
    except dist.DistBackendError as error:
        (folder / f"seen{rank}").write_text(f"{time.time()} {error}")


def fork_ranks(world: World, size: int, seed: int, folder: str) -> int:
    """Fork `size` ranks from this process and wait for all; the rank server would end the others after a death."""
    victim, children = random.Random(seed).randrange(size), []
    for rank in range(size):
        if child := os.fork():
            children.append(child)
            continue
        try:
            torch.set_num_threads(1)
            work_until_killed(rank, size, victim, seed, Path(folder))
        finally:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return victim


def kill_one_rank(server: RankServer, seed: int, size: int, folder: Path) -> tuple[float, list[str]]:
    """Kill one of `size` ranks in an operation; return the seconds until all others noticed, and their errors."""
    victim = server.run(fork_ranks, 1, (size, seed, str(folder)), deadline_s=60).values[0]
    killed = float((folder / "killed").read_text())
    seen = [(folder / f"seen{rank}").read_text().split(" ", 1) for rank in range(size) if rank != victim]
    messages = [text for _, text in seen]
    # A rank may report another survivor that has already reported and left.
    assert any(f"rank {victim} " in text for text in messages), messages
    assert all(re.search(r"rank \d has (left|ended)|rank \d gave up", text) for text in messages), messages
    return max(float(at) for at, _ in seen) - killed, messages


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("random", "kill"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, action="append")
    options = parser.parse_args()
    with RankServer() as server:
        for size in options.ranks or (2, 4):
            if options.what == "random":
                done = server.run(compare_with_gloo, size, (options.seed, options.count), deadline_s=3600).values
                print(f"{options.count} operations on {size} ranks: {sum(done)} tensors agree with gloo's", flush=True)
            else:
                worst = 0.0
                for seed in range(options.seed, options.seed + options.count):
                    with tempfile.TemporaryDirectory() as folder:
                        worst = max(worst, kill_one_rank(server, seed, size, Path(folder))[0])
                print(f"{options.count} ranks of {size} killed: seen after {worst:.2f} s at most", flush=True)


if __name__ == "__main__":
    sys.exit(main())
