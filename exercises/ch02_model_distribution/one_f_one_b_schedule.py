"""One forward, one backward.

Write the missing lines of one_f_one_b; its docstring specifies the result.
You may call: expand_phases, micro_batch_order, Action, min, max.
Check it with: python -m exercises check one_f_one_b_schedule

Stub a1822fe4.
"""

from minidist.parallel.pipeline.actions import Action
from minidist.parallel.pipeline.schedules import expand_phases, micro_batch_order


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B: warm-up forwards until the first micro-batch returns, then one backward after each forward.

    Stage s has at most min(stages - s, micro_batches) micro-batches in flight.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    raise NotImplementedError("return this stage's operations, in order")
