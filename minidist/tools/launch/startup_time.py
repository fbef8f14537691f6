"""Measure the start-up time of fresh ranks: `python -m minidist.tools.launch.startup_time [repetitions]`."""

import statistics
import sys
import time

from minidist.tools.launch.client import RankServer
from minidist.tools.launch.threads import usable_cores


def do_nothing(world) -> None:
    """Return at once. A job of this function takes only the start-up time that `main` measures."""


def main(repetitions: int) -> None:
    """Measure and print how many seconds a job of 1, 2 and 4 new ranks takes, each job `repetitions` times."""
    start_s = time.perf_counter()
    with RankServer() as server:
        server.run(do_nothing, 1)
        print(f"{usable_cores()} usable cores; server and first rank: {time.perf_counter() - start_s:.2f} s")
        for ranks in (1, 2, 4):
            times_s = [_time_one_job(server, ranks) for _ in range(repetitions)]
            median_s, best_s = statistics.median(times_s), min(times_s)
            print(f"{ranks} fresh rank(s) with gloo, start to end: median {median_s:.3f} s, best {best_s:.3f} s")


def _time_one_job(server: RankServer, ranks: int) -> float:
    """Return the seconds that one job of `do_nothing` takes."""
    start_s = time.perf_counter()
    server.run(do_nothing, ranks, backend="gloo")
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
