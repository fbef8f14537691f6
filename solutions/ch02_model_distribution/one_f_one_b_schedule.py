"""One forward, one backward: the solution, as it stands in minidist.parallel.pipeline.schedules.

The first gradient reaches stage s after the micro-batch has passed through the later stages and its gradient has come
back. Until then stage s can run stages - 1 - s more forwards, and from then on it runs one backward per forward: at
most stages - s micro-batches are in flight, whatever the number of micro-batches in the step. With GPipe all of them
are in flight. The bubble is the same: 1F1B saves memory, not time.

With one warm-up forward fewer the stage waits for a gradient although it has work to do; with one more it keeps an
activation earlier than needed. The order in which a stage waits matters: with stage and stages - 1 - stage swapped,
all stages deadlock.

Usual wrong answers:
* calls the package's function
* always one micro-batch
* with fewer micro-batches than stages, runs forwards of micro-batches that do not exist
* the last stage runs the most warm-up forwards, before any activation has arrived
* runs all forwards first
* omits the backwards of the cool-down
* all stages but the first run like the last one
* runs the backward of the newest micro-batch first
* runs a backward after each forward from the start, on every stage
* one warm-up forward fewer, so the stage waits
* one warm-up forward more, so one more micro-batch is in flight
* takes the order from the package's finished schedule
* returns no action
"""

from minidist.parallel.pipeline.actions import Action
from minidist.parallel.pipeline.schedules import expand_phases, micro_batch_order


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B: warm-up forwards until the first micro-batch returns, then one backward after each forward.

    Stage s has at most min(stages - s, micro_batches) micro-batches in flight.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    queue = micro_batch_order(micro_batches)
    return expand_phases([("F", stages - 1 - stage), ("F B", micro_batches)], F=queue, B=queue)
