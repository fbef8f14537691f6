"""All forwards, then all backwards: the solution, as it stands in minidist.parallel.pipeline.schedule_rules.

A stage has nothing to do until the first micro-batch has come down to it, and nothing more once the last one has left
for good: stages - 1 forwards and as many backwards in which somebody waits, whatever the number of micro-batches.
More micro-batches make that a smaller part of the step. But all of them are alive when the first backward begins, so
more micro-batches take more memory.

Usual wrong answers:
* as many micro-batches as there are stages, whatever was asked for
* backwards stand before the forwards that they need
* the package's own
* one micro-batch, always
* micro-batches are counted from 1
* the last stage sends gradients back in the order in which the others need them last
* the last micro-batch never comes back
* each micro-batch goes forward and backward before the next
* taken out of the package's finished schedule
* every second stage begins with the last micro-batch, and its neighbours wait for it
* nothing to do
"""

from minidist.parallel.pipeline.actions import Op
from minidist.parallel.pipeline.schedule_rules import expand_phases, micro_batch_order


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """All forwards, then all backwards; every micro-batch is alive when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=turns, B=turns)
