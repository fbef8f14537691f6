"""each_once: with fewer micro-batches than stages there are forwards of micro-batches that do not exist"""

from minidist.parallel.pipeline.actions import Op


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Forwards until the first micro-batch comes back, from then on a backward after each forward.

    Stage s has min(stages - s, micro_batches) micro-batches alive, however many there are.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    early = stages - 1 - stage
    ops = [Op("F", m) for m in range(early)]
    for m in range(micro_batches - early):
        ops += [Op("F", early + m), Op("B", m)]
    return ops + [Op("B", m) for m in range(max(0, micro_batches - early), micro_batches)]
