"""The data-parallel comparison: launch the ranks, gather what they saw, work out the figures."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from bench import lineup, memory, rounds
from bench.lineup import FLOOR, OURS
from bench.statistics import Interval, median_interval, paired_ratios, step_times
from bench.workload import Workload
from minidist.errors import RunError
from minidist.train.launch import RankServer, usable_cores

THREADS_PER_RANK = 1


@dataclass(frozen=True)
class Row:
    """One contender in one run.

    step_s: seconds of a step in each round; over_floor: its time over that of the floor; ours: our time over its time
    (below 1: we are faster). cpu_s, ours_cpu: the same of the CPU time of all ranks, which a busy machine disturbs
    less. tensor_bytes, resident_bytes: peak of the rank that holds most.
    """

    name: str
    kernel: str
    agreement: float | None
    step_s: list[float]
    over_floor: Interval | None
    ours: Interval | None
    cpu_s: list[float]
    ours_cpu: Interval | None
    tensor_bytes: int | None
    resident_bytes: int | None

    @property
    def median_s(self) -> float:
        return float(np.median(self.step_s))


@dataclass(frozen=True)
class Run:
    """All contenders at one number of ranks in one mode."""

    ranks: int
    mode: str
    rows: list[Row]
    left_out: list[str] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


def compare(
    server: RankServer,
    work: Workload,
    ranks: int,
    mode: str,
    n_rounds: int,
    steps: int,
    names: Sequence[str],
    with_memory: bool = True,
) -> Run:
    """Time the contenders in turns and measure the memory of each alone. Raises RunError when one computes wrongly."""
    present, left_out = lineup.present(ranks, work.global_batch)
    names = [name for name in present if name in names]
    options = {"threads": THREADS_PER_RANK, "deadline_s": 3600.0}
    seen = server.run(rounds.run, ranks, (names, work, mode, n_rounds, steps), **options).values
    if len(set(seen[0].kernels.values())) > 1:
        raise RunError(
            f"the contenders run different optimizer kernels, which no ratio can see through: {seen[0].kernels}"
        )
    spans = {name: np.array([turns.spans[name] for turns in seen]) for name in names}  # (ranks, rounds, 3)
    times = {name: step_times(spans[name]) / steps for name in names}
    cpu = {name: spans[name][:, :, 2].sum(axis=0) / steps for name in names}
    rows = []
    for name in names:
        tensors = residents = None
        if with_memory:
            tensors = max(server.run(memory.tensor_peak, ranks, (name, work, mode), **options).values)
            grown = server.run(memory.resident_peak, ranks, (name, work, mode), **options).values
            residents = None if None in grown else max(grown)
        rows.append(
            Row(
                name,
                seen[0].kernels[name],
                seen[0].agreement.get(name),
                times[name].tolist(),
                _ratio(times, name, FLOOR),
                _ratio(times, OURS, name),
                cpu[name].tolist(),
                _ratio(cpu, OURS, name),
                tensors,
                residents,
            )
        )
    return Run(ranks, mode, rows, left_out)


def _ratio(times: dict[str, np.ndarray], above: str, below: str) -> Interval | None:
    if above == below or above not in times or below not in times:
        return None
    return median_interval(paired_ratios(times[above], times[below]))


def machine_facts() -> dict:
    """What the figures depend on besides the programs."""
    return {
        "cores": usable_cores(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
        "threads_per_rank": THREADS_PER_RANK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def workload_facts(work: Workload) -> dict:
    return {
        "parameters": work.model.num_parameters(),
        "global_batch": work.global_batch,
        "seq_len": work.seq_len,
        "clip_norm": work.clip_norm,
        "model": asdict(work.model),
    }


def as_json(runs: Sequence[Run], work: Workload, n_rounds: int, steps: int) -> dict:
    """Everything that was measured, for `--json`. Times in seconds, sizes in bytes."""
    return {
        "machine": machine_facts(),
        "workload": workload_facts(work),
        "rounds": n_rounds,
        "steps_per_round": steps,
        "tolerance": rounds.TOLERANCE,
        "runs": [
            {
                "ranks": run.ranks,
                "mode": run.mode,
                "left_out": run.left_out,
                "verdict": list(verdict(run)),
                "contenders": {row.name: _row_json(row) for row in run.rows},
            }
            for run in runs
        ],
    }


def _row_json(row: Row) -> dict:
    values = asdict(row) | {"median_s": row.median_s}
    for key in ("over_floor", "ours", "ours_cpu"):
        interval = getattr(row, key)
        values[key] = None if interval is None else interval._asdict()
    del values["name"]
    return values


def verdict(run: Run) -> Iterator[str]:
    """One sentence on time and one on memory: ours against torch's DDP, and what was wanted."""
    ours, peer = run.row(OURS), run.row(lineup.REFERENCE_PEER)
    if ours is None or peer is None:
        return
    holds = peer.ours.median <= 1.00 and peer.ours.high <= 1.05
    yield (
        f"time {'holds' if holds else 'DOES NOT HOLD'}: {OURS} / {peer.name} = {peer.ours} "
        f"at {run.ranks} ranks, {run.mode} (wanted: median <= 1.00, upper end <= 1.05)"
    )
    if ours.tensor_bytes is not None:
        holds = ours.tensor_bytes <= peer.tensor_bytes
        yield (
            f"memory {'holds' if holds else 'DOES NOT HOLD'}: peak of {ours.tensor_bytes / 2**20:.1f} MiB against "
            f"{peer.tensor_bytes / 2**20:.1f} MiB of live tensors and mapped segments (wanted: no higher)"
        )
