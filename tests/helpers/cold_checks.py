"""How long a check takes from a cold shell: `python -m tests.helpers.cold_checks [NAMES]`.

Runs `python -m exercises check` on each solution, in a process of its own, one after the other, with nothing else
running. Prints the seconds from start to verdict, with their median and maximum.
"""

import statistics
import subprocess
import sys
import time

from exercises.catalogue import Catalogue


def seconds_of_check(name: str, solution: str) -> float:
    """Return the seconds of one check. Raises CalledProcessError if the solution does not pass."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "exercises", "check", name, "--file", solution]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    catalogue = Catalogue()
    chosen = [catalogue[name] for name in sys.argv[1:]] or list(catalogue.values())
    found = []
    for exercise in chosen:
        found.append(seconds_of_check(exercise.name, str(exercise.solution)))
        print(f"{exercise.name:<28}{found[-1]:6.1f} s", flush=True)
    print(f"{len(found)} checks: median {statistics.median(found):.1f} s, at most {max(found):.1f} s")
