"""few_are_alive: one forward more than there is room for"""

from minidist.parallel.pipeline.actions import Op
from minidist.parallel.pipeline.schedule_rules import in_turn, play


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Forwards until the first micro-batch comes back, from then on a backward after each forward.

    Stage s has min(stages - s, micro_batches) micro-batches alive, however many there are.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    turns = in_turn(micro_batches)
    return play([("F", stages - stage), ("F B", micro_batches)], F=turns, B=turns)
