"""GPipe as a list of actions: the solution, as it stands in minidist.simple.pipeline.

A stage is idle until the first micro-batch reaches it, and idle again after its last backward: the bubble is stages -
1 forwards and as many backwards, whatever the number of micro-batches. More micro-batches make the bubble a smaller
fraction of the step. But all of them are in flight when the first backward begins, so more micro-batches need more
activation memory.

A schedule says nothing about time or messages. It is an order, from which a simulator computes the times and an
executor the transfers.

Usual wrong answers:
* the package's own
* returns one number for all micro-batches
* runs the backward of the last micro-batch first
* runs the backward of each micro-batch right after its forward: one stage works at a time
* returns the actions of one stage, without a list per stage
* exchanges the number of stages and the number of micro-batches
* leaves out the micro-batches that a stage would have to wait for
* returns zeros for all numbers
"""

from minidist.simple.pipeline import Action


def gpipe(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage, in order: all forwards, then all backwards."""
    return [[(kind, i) for kind in "FB" for i in range(num_micro_batches)] for _ in range(num_stages)]
