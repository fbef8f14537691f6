"""one_at_a_time: the package's own"""

from minidist.comm import overlap


def in_flight(full_s, lasts_s):
    return overlap.in_flight(full_s, lasts_s)


def finished_s(total, bucket, backward_s, seconds):
    return overlap.finished_s(total, bucket, backward_s, seconds)


def best_bucket(total, backward_s, seconds, choices=()):
    return overlap.best_bucket(total, backward_s, seconds, choices)
