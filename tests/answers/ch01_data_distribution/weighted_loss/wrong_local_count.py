"""uneven_padding: every rank divides by the number of its own tokens"""


class Local:
    def __init__(self, value):
        self.value = value


def count_tokens(counts, weight, group):
    return Local(float(sum(counts) * weight))


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
