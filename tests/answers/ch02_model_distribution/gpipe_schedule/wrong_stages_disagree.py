"""nobody_waits_longer_than_must_be: every second stage begins with the last micro-batch, and its neighbours wait
for it
"""

from minidist.parallel.pipeline.actions import Op


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """All forwards, then all backwards; every micro-batch is alive when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    turns = range(micro_batches)[:: -1 if stage % 2 else 1]
    return [Op(kind, m) for kind in "FB" for m in turns]
