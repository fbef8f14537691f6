"""each_once: one micro-batch, always"""

from minidist.parallel.pipeline.actions import Op


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """All forwards, then all backwards; every micro-batch is alive when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    return [Op("F", 0), Op("B", 0)]
