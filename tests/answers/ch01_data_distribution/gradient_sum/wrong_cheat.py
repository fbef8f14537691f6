"""sums_over_ranks: the package's own sink under the learner's name"""

from minidist.parallel import grads


class NaiveSink(grads.NaiveSink):
    pass
