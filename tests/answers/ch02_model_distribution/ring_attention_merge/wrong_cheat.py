"""two_parts_are_the_whole (forbidden): the package's own"""

from minidist.parallel.context.merge import merge

__all__ = ["merge"]
