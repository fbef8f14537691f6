"""Tests of bucket_overlap: the times compared with a simulated clock, and the order with the trainer's reducer."""

import itertools
import random

import torch
from torch import nn

from exercises.testing import expect, expect_raises, test
from minidist.parallel.data.buckets import BucketedReducer
from minidist.parameters import replicated_specs

BUCKETS, EACH = 4, 3  # of the reducer: parameters of 4 float32 each, three to a bucket
KIB = 2**10


def simulated(ready, durations):
    """[start, end] of each bucket in ticks: whenever the network is free, the next one in index order may start."""
    times, now, free = [], 0, 0
    while len(times) < len(ready):
        if now >= free and now >= ready[len(times)]:
            free = now + durations[len(times)]
            times.append([now, free])
        else:
            now += 1
    return times


def end_of_reduction(total, bucket, backward_s, seconds):
    """Seconds until all gradients are reduced, bucket by bucket."""
    done, given = 0.0, 0
    while given < total:
        size = min(bucket, total - given)
        given += size
        done = max(done, backward_s * given / total) + seconds(size)
    return done


def times_of(answer, full, lasts):
    return [list(pair) for pair in answer.bucket_intervals(list(full), list(lasts))]


def expect_times(answer, full, lasts):
    """Compare with the simulated clock, whose tick is a second, and an eighth of one."""
    expected = simulated(full, lasts)
    expect("[start, end] of each bucket", times_of(answer, full, lasts), expected)
    eighths = [[number / 8 for number in numbers] for numbers in (full, lasts)]
    expect("[start, end] of each bucket", times_of(answer, *eighths), [[a / 8, b / 8] for a, b in expected])


@test(points=3)
def one_reduction_at_a_time(answer):
    """A bucket's reduction starts when the bucket is ready and the previous reduction has ended."""
    draw = random.Random(3)
    for full, lasts in (([2, 4, 6], [1, 1, 1]), ([2, 4, 6], [5, 5, 5]), ([2, 4, 9], [5, 0, 1]), ([], [])):
        expect_times(answer, full, lasts)
    for count in range(1, 12):
        expect_times(answer, sorted(draw.choices(range(20), k=count)), draw.choices(range(9), k=count))
    for full, lasts in (([1, 2], [1]), ([1], [1, 2]), ([], [1]), ([1], []), ([5, 1, 2, 3], [0, 0]), ([0], [0, 0, 0])):
        expect_raises(ValueError, answer.bucket_intervals, full, lasts)


@test(points=3)
def in_index_order(answer):
    """A bucket that is ready early waits for the buckets before it: all ranks launch in index order."""
    draw = random.Random(4)
    for full, lasts in (([5, 1], [1, 1]), ([3, 9, 2, 4], [1, 1, 1, 1])):
        expect_times(answer, full, lasts)
    for count in range(2, 12):
        expect_times(answer, draw.choices(range(20), k=count), draw.choices(range(4), k=count))


@test(points=4, ranks=(2,))
def matches_the_reducer(answer, world, network):
    """The trainer's reducer launches each bucket when bucket_intervals says that it starts. Each ready gradient is one
    tick, and a reduction takes no time."""
    names = [f"p{number}" for number in range(BUCKETS * EACH)]
    for seed in range(3):
        order = list(names)
        random.Random(10 * seed + world.rank).shuffle(order)  # autograd's order, different on every rank
        launched = observed_launches(network, names, order)
        buckets = [names[EACH * number : EACH * (number + 1)] for number in range(BUCKETS)]
        full = [max(order.index(name) + 1 for name in bucket) for bucket in buckets]
        begins = [begin for begin, _ in answer.bucket_intervals(full, [0] * BUCKETS)]
        what = f"gradients that are ready when each bucket starts (the trainer's reducer launches after {launched})"
        expect(what, begins, launched)


def observed_launches(network, names, order):
    """Return how many gradients were ready when the package's reducer launched each bucket."""
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in reversed(names)}  # the reducer starts with the last
    specs = replicated_specs(nn.ParameterDict(parameters), network.group.ranks)
    reducer = BucketedReducer(parameters, specs, [network.group], bucket_bytes=4 * 4 * EACH)
    before, marks = len(network.records), len(network.events)
    for name in order:
        reducer.accumulate(name, torch.ones(4))
        network.event(name)
        reducer.mark_ready(name)
    reducer.finish_reductions()
    ready = [tick for tick, _ in network.events[marks:]]
    return [sum(tick < record.launched for tick in ready) for record in network.records[before:]]


@test(points=3)
def end_of_the_last_reduction(answer):
    """Backward produces gradients at a constant rate, and the last bucket holds the remainder."""
    for total, bucket, backward_s, alpha, beta in (
        (12, 4, 3, 0, 0.25),
        (12, 4, 3, 1, 0.5),
        (10, 4, 5, 1, 0),
        (10, 4, 5, 0, 1),
        (3, 8, 6, 1, 1),
        (7, 7, 7, 2, 0),
    ):

        def seconds(n, alpha=alpha, beta=beta):
            return alpha + beta * n

        done = end_of_reduction(total, bucket, backward_s, seconds)
        got = answer.last_bucket_end_s(total, bucket, backward_s, seconds)
        case = f"{total} bytes in buckets of {bucket}, backward {backward_s} s, a reduction {alpha} + {beta} n s"
        expect("seconds until all gradients are reduced", got, done, tolerance=1e-9, case=case)
    for total, bucket, backward_s in itertools.product(range(1, 11), range(1, 13), (0, 3)):
        for name, seconds in (
            ("the square of its bytes", lambda n: n * n),
            ("1 s if its bytes are odd", lambda n: n % 2),
        ):
            done = end_of_reduction(total, bucket, backward_s, seconds)
            got = answer.last_bucket_end_s(total, bucket, backward_s, seconds)
            case = f"{total} bytes in buckets of {bucket}, backward {backward_s} s, a reduction {name}"
            expect("seconds until all gradients are reduced", got, done, tolerance=1e-9, case=case)
    for backward_s in (0.0, 3.0):
        got = answer.last_bucket_end_s(0, 4, backward_s, lambda n: 1.0)
        expect("seconds without gradients", got, 0.0, case=f"0 bytes in buckets of 4, backward {backward_s} s")


@test(points=3)
def best_size(answer):
    """The size with which all gradients are reduced soonest; of equals, the largest."""
    # Powers of two, as sums of which no rounding breaks a tie.
    links = {
        "alpha 2^-10 s": (2.0**-10, 0.0),
        "2^30 bytes/s": (0.0, 2.0**-30),
        "both": (2.0**-10, 2.0**-30),
        "slow": (2.0**-13, 2.0**-23),
        "free": (0, 0),
    }
    for name, (alpha, beta) in links.items():
        for total in (256 * KIB, 4096 * KIB):

            def seconds(n, alpha=alpha, beta=beta):
                return alpha + beta * n

            choices = [256 * KIB, 16384 * KIB, 64 * KIB, 4096 * KIB, 1024 * KIB]
            soonest = {size: end_of_reduction(total, size, 2.0**-6, seconds) for size in choices}
            wanted = max(size for size in choices if soonest[size] == min(soonest.values()))
            got = answer.best_bucket_bytes(total, 2.0**-6, seconds, choices)
            expect(f"the best bucket on the link {name!r}, of {choices}", got, wanted)
    draw = random.Random(5)
    for _ in range(60):  # whole numbers: many ties, of sizes in any order, also above the total
        total, choices = draw.randrange(12), draw.choices(range(1, 16), k=draw.randint(1, 6))
        table = draw.choices(range(3), k=16)

        def seconds(n, table=table):
            return table[int(n)]

        soonest = {size: end_of_reduction(total, size, 0, seconds) for size in choices}
        wanted = max(size for size in choices if soonest[size] == min(soonest.values()))
        got = answer.best_bucket_bytes(total, 0, seconds, list(choices))
        what = f"the best bucket for {total} bytes, of {choices}, if n bytes take the seconds {table}[n]"
        expect(what, got, wanted)
    for exponent in range(16, 21):  # each of the default sizes is the best on one link
        got = answer.best_bucket_bytes(2**20, 1.0, lambda n, best=2**exponent: float(n != best))
        expect(f"the best of the default sizes for 2**20 bytes, if only 2**{exponent} take no time", got, 2**exponent)
    smallest = answer.best_bucket_bytes(384 * KIB, 0.02, lambda n: 1e-9 * n)
    expect("the best of the default sizes when a message has no latency", smallest, 64 * KIB)
    sizes = ((256, 256), (384, 512), (64, 64), (128, 128), (1, 64))
    sizes = [(total * KIB, size * KIB) for total, size in sizes]
    for total, size in (*sizes, (2**16 + 1, 2**17), (2**17 - 1, 2**17), (2**17 + 1, 2**18), (1, 2**16), (0, 2**16)):
        got = answer.best_bucket_bytes(total, 0.02, lambda n: 1.0)
        what = f"the best of the default sizes for {total} bytes when a message has only latency: one bucket"
        expect(what, got, size)
