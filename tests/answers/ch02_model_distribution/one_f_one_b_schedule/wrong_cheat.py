"""each_once (forbidden): the package's own"""

from minidist.parallel.pipeline.schedule_rules import one_f_one_b

__all__ = ["one_f_one_b"]
