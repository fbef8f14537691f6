"""one_at_a_time: the same times for everything"""


def in_flight(full_s, lasts_s):
    return [(2, 3) for _ in full_s]


def finished_s(total, bucket, backward_s, seconds):
    return 4.0


def best_bucket(total, backward_s, seconds, choices=()):
    return 65536
