"""All forwards, then all backwards: the solution, as it stands in minidist.parallel.pipeline.schedule_rules.

A stage is idle until the first micro-batch reaches it, and idle again after its last backward: the bubble is stages -
1 forwards and as many backwards, whatever the number of micro-batches. More micro-batches make the bubble a smaller
fraction of the step. But all of them are in flight when the first backward begins, so more micro-batches need more
activation memory.

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
    """GPipe: all forwards, then all backwards; all micro-batches are in flight when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=turns, B=turns)
