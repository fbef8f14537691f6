"""nobody_waits_longer_than_must_be: the last stage sends gradients back in the order in which the others need them
last
"""

from minidist.parallel.pipeline.actions import Op


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """All forwards, then all backwards; every micro-batch is alive when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    back = range(micro_batches)[:: -1 if stage == stages - 1 > 0 else 1]
    return [Op("F", m) for m in range(micro_batches)] + [Op("B", m) for m in back]
