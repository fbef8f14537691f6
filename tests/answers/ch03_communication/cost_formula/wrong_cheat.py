"""a_tree_down: the package's own formula"""

from minidist.comm import cost as formulas


def cost(name, algorithm, size, n):
    return formulas.cost(name, algorithm, size, n)
