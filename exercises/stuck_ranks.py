"""Grades predictions: runs the scenarios and finds the ranks that never return, from their status.

The answers are not stored, so they cannot be wrong. A scenario is over when every rank has returned or provably waits
for ever.
"""

import ast
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.errors import RunError
from minidist.tools.deadlock.detector import ENDED, DeadlockDetector

if TYPE_CHECKING:
    from minidist.tools.launch import RankServer
    from minidist.tools.launch.live_job import LiveJob

_LONGEST_S = 30.0


def find_stuck_ranks(program: Path, names: Sequence[str], server: "RankServer") -> dict[str, list[int]]:
    """Run all scenarios at the same time; return the ranks that wait for ever, by scenario.

    program: its RANKS says on how many ranks each function runs. Raises RunError when one does not end as it should.
    """
    sizes = read_world_sizes(program)
    jobs = {}
    try:
        for name in names:
            jobs[name] = server.start(
                run_scenario, sizes[name], (str(program), name), backend=None, threads=1, live=True
            )
        return {name: _find_waiting_ranks(job, name) for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()


def run_scenario(world, rank_worker, program: str, name: str) -> None:
    """Run one scenario on this rank, over a default group that reports to rank status."""
    rank_worker.recreate_process_group(0)
    spec = importlib.util.spec_from_file_location("scenarios", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(world.rank)


def _find_waiting_ranks(job: "LiveJob", name: str) -> list[int]:
    """Return the ranks that wait for ever once all others have returned. Raises RunError if a rank does neither."""
    detector, end_s = DeadlockDetector(), time.monotonic() + _LONGEST_S
    while time.monotonic() < end_s and not job.has_ended:
        job.poll(detector.interval_s)
        seen = job.last_snapshots()
        diagnosis = detector.update(seen, time.monotonic())
        stuck = set(diagnosis.ranks) if diagnosis else set()
        ended = {rank for rank, snapshot in seen.items() if snapshot.state in ENDED}
        if any(seen[rank].state == "failed" for rank in ended) or job.dead_ranks:
            break
        if len(stuck | ended) == job.size:
            return sorted(stuck)
    raise RunError(f"the scenario {name} neither ended nor was blocked for ever on all its {job.size} ranks")


def read_world_sizes(program: Path) -> dict[str, int]:
    """Read from the program on how many ranks each scenario runs. Raises RunError if it does not say."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "RANKS" for target in node.targets):
            return ast.literal_eval(node.value)
    raise RunError(f"{program} has no RANKS")
