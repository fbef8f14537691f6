"""Rounds of local steps in simulated time: when each replica computes, waits for others, and exchanges a message."""

from collections.abc import Sequence

from minidist.tools.consistency.clock import COMPUTING, MESSAGE, WAITING
from minidist.tools.simulate.failures import Phase


def simulate_rounds(compute_s: Sequence[Sequence[float]], message_s: float, h: int) -> list[list[Phase]]:
    """Return the phases of each replica: h steps, waiting for the slowest replica, and a collective of all replicas.

    compute_s: by replica, the seconds of each step; equally many for all. message_s: duration of the collective. With
    h = 1 this is synchronous training, with its all-reduce after every step. A last round may have fewer steps.
    """
    phases: list[list[Phase]] = [[] for _ in compute_s]
    start_s = 0.0
    for first in range(0, len(compute_s[0]), h):
        ends_s = [start_s + sum(steps[first : first + h]) for steps in compute_s]
        for replica, end_s in enumerate(ends_s):
            at_s = start_s
            for step_s in compute_s[replica][first : first + h]:
                phases[replica].append(Phase(COMPUTING, at_s, at_s + step_s))
                at_s += step_s
            if end_s < max(ends_s):
                phases[replica].append(Phase(WAITING, end_s, max(ends_s)))
            phases[replica].append(Phase(MESSAGE, max(ends_s), max(ends_s) + message_s))
        start_s = max(ends_s) + message_s
    return phases
