"""uneven_padding: calls the package's own"""

from minidist.train import loss


def count_tokens(counts, weight, group):
    return loss.count_tokens(counts, weight, group)


def backward(loss_sums, weight, count):
    return loss.backward(loss_sums, weight, count)
