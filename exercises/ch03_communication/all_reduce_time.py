"""Predict the time of an all-reduce.

Warm-up for the choice of an algorithm. Write the cost model of the three all-reduces of this chapter: the time of their
slowest chain of rounds, where a round in which a rank sends n bytes takes latency_s + n / bytes_per_s.

algorithm: "tree" (a reduce to rank 0 and a broadcast), "ring" or "doubling" (recursive halving and doubling);
ValueError for any other. num_ranks: 1 or more. num_bytes: of the full tensor, whose chunks and halves count as
equal. Additions take no time. If num_ranks is no power of two, doubling sends the full tensor twice more, to fold and
to unfold the surplus ranks. Returns seconds.
Example: 4 MB, 1 ms, 1 GB/s. On 4 ranks a tree takes 4 rounds of 1 + 4 ms: 0.020. A ring takes 6 rounds of 1 + 1 ms:
    0.012. Doubling takes rounds of 1 + 2, 1 + 1, 1 + 1 and 1 + 2 ms: 0.010; on 6 ranks two of 1 + 4 ms more: 0.020

Checked: each algorithm on 1 to 33 ranks, and some numbers up to 1025, against rounds added one by one; latency and
bandwidth apart; an empty tensor; unknown names, also in another spelling.

You may call:
    math.ceil(math.log2(n)), n.bit_length()   the depth of a binomial tree over n ranks; the number of bits of n

Check it with: python -m exercises check all_reduce_time

Stub 2a317f42.
"""

import math

from minidist.simple.collectives import ALL_REDUCE


def time_s(algorithm: str, num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return the modelled time of an all-reduce: latency + bytes / bandwidth of a round, summed over its slowest chain.

    algorithm: a name in `ALL_REDUCE`. Every rank has a link of its own, chunks are equal, and additions take no time.
    """
    raise NotImplementedError("add up the rounds of each algorithm")
