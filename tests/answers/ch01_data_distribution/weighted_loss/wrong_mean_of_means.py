"""uneven_padding: each rank takes the mean of its own tokens, and the means are averaged"""


class Shares:
    """The number of tokens of this rank, times that of ranks."""

    def __init__(self, mine, group):
        self.value = mine * group.size


def count_tokens(counts, weight, group):
    return Shares(float(sum(counts) * weight), group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
