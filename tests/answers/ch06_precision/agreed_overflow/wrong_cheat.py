"""everybody_has_the_sums (forbidden): the package's own"""

from minidist.train.agree import agree

__all__ = ["agree"]
