"""How long a check takes from a cold shell: `python -m tests.helpers.cold_checks [NAMES]`.

Runs `python -m exercises check` on each solution, in a process of its own, one after the other, with nothing else
running. Prints the seconds from start to verdict, with their median and maximum, and the processor time of the check
and all its ranks, which other work on the machine changes less.
"""

import resource
import statistics
import subprocess
import sys
import time

from exercises.catalogue import Catalogue


def measure_check(name: str, solution: str) -> tuple[float, float]:
    """Return the seconds and the processor seconds of one check.

    Raises CalledProcessError if the solution does not pass.
    """
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "exercises", "check", name, "--file", solution]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - start, processor_s


if __name__ == "__main__":
    catalogue = Catalogue()
    chosen = [catalogue[name] for name in sys.argv[1:]] or list(catalogue.values())
    found = []
    for exercise in chosen:
        found.append(measure_check(exercise.name, str(exercise.solution)))
        print(f"{exercise.name:<28}{found[-1][0]:6.1f} s{found[-1][1]:7.1f} s of processor time", flush=True)
    seconds, processor_s = zip(*found, strict=True)
    median, most = statistics.median(seconds), max(seconds)
    print(
        f"{len(found)} checks: median {median:.1f} s, at most {most:.1f} s; {sum(processor_s):.0f} s of processor time"
    )
