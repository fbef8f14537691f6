"""What a prediction is judged by: its scenarios are run, and the status of ranks tells which ranks wait for ever.

The answers are stored nowhere, so they cannot be wrong. A scenario is over when every rank has returned or is proven to
be stuck; a rank that is on its way to either is waited for.
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


def measure(program: Path, names: Sequence[str], server: "RankServer") -> dict[str, list[int]]:
    """The ranks that wait for ever, by scenario. All scenarios run at the same time.

    program: its RANKS says on how many ranks each function runs. Raises RunError when one does not end as it should.
    """
    sizes = sizes_of(program)
    jobs = {}
    try:
        for name in names:
            jobs[name] = server.start(
                run_scenario, sizes[name], (str(program), name), backend=None, threads=1, live=True
            )
        return {name: _waiting(job, name) for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()


def run_scenario(world, live_rank, program: str, name: str) -> None:
    """On each rank: the function, over a default group that reports rank status."""
    live_rank.recreate_group(0)
    spec = importlib.util.spec_from_file_location("scenarios", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(world.rank)


def _waiting(job: "LiveJob", name: str) -> list[int]:
    detector, end_s = DeadlockDetector(), time.monotonic() + _LONGEST_S
    while time.monotonic() < end_s and not job.done:
        job.poll(detector.interval_s)
        seen = job.last_snapshots()
        verdict = detector.update(seen, time.monotonic())
        stuck = set(verdict.ranks) if verdict else set()
        ended = {rank for rank, snapshot in seen.items() if snapshot.state in ENDED}
        if any(seen[rank].state == "failed" for rank in ended) or job.dead_ranks:
            break
        if len(stuck | ended) == job.size:
            return sorted(stuck)
    raise RunError(f"the scenario {name} neither ended nor stood still on all its {job.size} ranks")


def sizes_of(program: Path) -> dict[str, int]:
    """On how many ranks each scenario runs. Raises RunError when the program does not say."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "RANKS" for target in node.targets):
            return ast.literal_eval(node.value)
    raise RunError(f"{program} has no RANKS")
