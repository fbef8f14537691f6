"""sums_over_ranks: the package's own sink under the learner's name"""

from minidist.parallel.data import reducer as grads


class NaiveSink(grads.NaiveSink):
    pass
