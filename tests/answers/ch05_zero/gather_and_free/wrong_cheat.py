"""a_row_comes_and_goes: the package's own under the learner's names"""

from minidist.zero import blocks
from minidist.zero import flat_param as unit


class ShardedUnit(unit.ShardedUnit):
    pass


class Blocks(blocks.Blocks):
    pass
