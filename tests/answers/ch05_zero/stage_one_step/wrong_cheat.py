"""parameters_lie_in_the_row: the package's own under the learner's names"""

from minidist.zero import flat_param as unit
from minidist.zero import gradients


class WholeGradients(gradients.WholeGradients):
    pass


class Unit(unit.Unit):
    pass
