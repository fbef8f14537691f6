"""Faults to inject into a run on purpose, to see that the run survives them: "kill rank 1 at step 3 in update".

This module knows the faults; `tools/chaos/injector.py` carries them out when the run comes to their phase.
"""

import re
from dataclasses import dataclass

from minidist.errors import UserError, suggest

# The phases of a step (`train/engine.py`) and of a save (`checkpoint/save.py`), in order.
STEP_PHASES = ("forward", "backward", "reduce", "agree", "update", "gather")
SAVE_PHASES = ("copy", "write", "rename")
PHASES = (*STEP_PHASES, *SAVE_PHASES)
# The kinds of faults, and the phases in which each can be injected.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": PHASES,  # SIGKILL: the process ends
    "stop": PHASES,  # SIGSTOP: the process keeps its connections and does nothing
    "slow": PHASES,  # the rank sleeps SLOW_S every time it comes to the phase, from that step on
    "nan": ("backward", "agree"),  # an element of a local gradient, or of the reduced gradient, becomes NaN
    "flip": STEP_PHASES,  # a bit of a parameter flips
    "full": SAVE_PHASES,  # no space is left on the disk
}
SLOW_S = 0.05
_SYNTAX = re.compile(r"(\w+) rank (\d+) at step (\d+) in (\w+)")


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a run, such as "kill rank 1 at step 3 in update".

    kind: one of KINDS. rank: the rank on which it occurs. step: the number of the step, from 1. phase: the part of a
    step or of a checkpoint save, one of PHASES. A fault in a save occurs in the save after that step, or in the next
    save.
    """

    kind: str
    rank: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} at step {self.step} in {self.phase}"


def parse_fault(text: str, ranks: int | None = None) -> Fault:
    """Parse the text of a fault, such as "kill rank 1 at step 3 in update". Raises UserError if there is no such fault.

    ranks: the number of ranks of the run, if known.
    """
    match = _SYNTAX.fullmatch(text.strip().lower())
    if match is None:
        raise UserError(f'fault.inject is {text!r}: write it like "kill rank 1 at step 3 in update".')
    fault = Fault(match[1], int(match[2]), int(match[3]), match[4])
    if fault.kind not in KINDS:
        raise UserError(f"fault.inject: there is no fault {fault.kind!r}; {suggest(fault.kind, KINDS)}")
    if fault.phase not in KINDS[fault.kind]:
        raise UserError(
            f"fault.inject: {fault.kind!r} cannot be injected in {fault.phase!r}; "
            + suggest(fault.phase, KINDS[fault.kind])
        )
    if fault.step < 1:
        raise UserError("fault.inject: the first step is step 1.")
    if ranks is not None and fault.rank >= ranks:
        raise UserError(f"fault.inject names rank {fault.rank}; the run has ranks 0 to {ranks - 1}.")
    if fault.phase == "rename" and fault.rank > 0:
        raise UserError(f"fault.inject names rank {fault.rank} in rename, but only rank 0 renames: give rank 0.")
    return fault
