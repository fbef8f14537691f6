"""One forward, one backward: the solution, as it stands in minidist.parallel.pipeline.schedule_rules.

The first gradient comes back to stage s when the micro-batch has gone down to the last stage and up again. Until then
there is work for just stages - 1 - s more forwards, and from then on every forward is paid for with a backward:
stages - s micro-batches are alive at most, however many there are in the step. With GPipe it is all of them. The
bubble is the same: what 1F1B saves is memory.

One forward fewer at the beginning, and the stage waits for a gradient with work left to do; one more, and it holds an
activation that nobody needs yet. In which order a stage waits is no detail: with stage and stages - 1 - stage swapped
all of them wait for each other for ever.

Usual wrong answers:
* the package's own
* one micro-batch, always
* with fewer micro-batches than stages there are forwards of micro-batches that do not exist
* the last stage runs the most forwards early, and none of them has come
* all forwards first
* the micro-batches alive at the end never come back
* all stages but the first run as the last one does
* the newest micro-batch is to come back first, and the older ones are in its way
* a backward after each forward from the beginning, on every stage
* one forward fewer before the first backward, and the stage waits
* one forward more than there is room for
* taken out of the package's finished schedule
* nothing to do
"""

from minidist.parallel.pipeline.actions import Op
from minidist.parallel.pipeline.schedule_rules import expand_phases, micro_batch_order


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Forwards until the first micro-batch comes back, from then on a backward after each forward.

    Stage s has min(stages - s, micro_batches) micro-batches alive, however many there are.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", stages - 1 - stage), ("F B", micro_batches)], F=turns, B=turns)
