"""same_numbers (forbidden): the package's own"""

from minidist.recompute import _Again, recomputed

__all__ = ["_Again", "recomputed"]
