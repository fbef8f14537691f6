"""All forwards, then all backwards: the solution, as it stands in minidist.parallel.pipeline.schedules.

A stage is idle until the first micro-batch reaches it, and idle again after its last backward: the bubble is stages -
1 forwards and as many backwards, whatever the number of micro-batches. More micro-batches make the bubble a smaller
fraction of the step. But all of them are in flight when the first backward begins, so more micro-batches need more
activation memory.

Usual wrong answers:
* uses as many micro-batches as stages
* runs backwards before the forwards that they need
* calls the package's function
* always one micro-batch
* counts micro-batches from 1
* the last stage runs the backwards in an order that differs from that of the other stages
* omits the last backward
* runs forward and backward of each micro-batch before the next
* takes the order from the package's finished schedule
* every second stage begins with the last micro-batch, and its neighbours wait for it
* returns no action
"""

from minidist.parallel.pipeline.actions import Action
from minidist.parallel.pipeline.schedules import expand_phases, micro_batch_order


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe: one forward per micro-batch, then one backward per micro-batch.

    All micro-batches are in flight when the first backward begins.
    Huang et al. 2019, section 2.2 and figure 2.
    """
    queue = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=queue, B=queue)
