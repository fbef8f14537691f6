"""each_once (forbidden): the package's own"""

from minidist.parallel.pipeline.schedule_rules import gpipe

__all__ = ["gpipe"]
