"""each_once (forbidden): the package's own"""

from minidist.parallel.pipeline.rules import gpipe

__all__ = ["gpipe"]
