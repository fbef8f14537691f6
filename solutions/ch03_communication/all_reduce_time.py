"""Predict the time of an all-reduce: the solution, as it stands in minidist.simple.collectives.

A message costs the latency plus its bytes over the bandwidth. So rounds and bytes describe an algorithm, and the size
of the tensor decides which algorithm is best: small tensors need few rounds, large ones few bytes. On a link with ten
times the bandwidth the bytes get cheaper and the rounds do not, so the boundary between the two moves.

The slowest chain counts, not the total: in one round of the tree many messages are in flight at once, and together
they take the time of one.

Usual wrong answers:
* folds powers of two as well
* takes every other name for doubling
* accepts a name in any spelling, such as 'Ring' or ' ring'
* the halves of all ranks, although only a power of two of them halves
* the package's own model
* the same time for everything
* no time for an empty tensor
* right for powers of two only
* folds the surplus ranks one after the other
* folds odd numbers of ranks only
* the full tensor in each round of the ring
* the halving alone
* surplus ranks cost nothing
* one round too many in each half
* only one half of the ring
* only the reduce: no rank but the root has the sum
* accepts every name that begins like one of the three
* counts all messages instead of the slowest chain
* rounds a chunk down to whole bytes
* everything is free
"""

import math

from minidist.simple.collectives import ALL_REDUCE


def time_s(algorithm: str, num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return the modelled time of an all-reduce: latency + bytes / bandwidth of a round, summed over its slowest chain.

    algorithm: a name in `ALL_REDUCE`. Every rank has a link of its own, chunks are equal, and additions take no time.
    """
    full_round_s = latency_s + num_bytes / bytes_per_s
    match algorithm:
        case "tree":
            return 2 * math.ceil(math.log2(num_ranks)) * full_round_s
        case "ring":
            return 2 * (num_ranks - 1) * (latency_s + num_bytes / num_ranks / bytes_per_s)
        case "doubling":
            num_halvings = num_ranks.bit_length() - 1
            sent = num_bytes * (1 - 1 / 2**num_halvings)
            folding_s = 2 * full_round_s if num_ranks > 2**num_halvings else 0.0
            return 2 * (num_halvings * latency_s + sent / bytes_per_s) + folding_s
    raise ValueError(f"no algorithm {algorithm!r}: possible are {', '.join(ALL_REDUCE)}")
