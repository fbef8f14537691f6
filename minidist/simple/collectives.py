"""Collectives from send and receive (`--comm.algorithm`): how an all-reduce moves its bytes, and what that costs.

    tree_broadcast, tree_reduce     a binomial tree: log2(n) rounds, in each of which the whole tensor is sent
    ring_all_reduce                 a ring: 2 (n - 1) rounds, but only 2 (n - 1) / n of the tensor per rank
    halving_doubling_all_reduce     recursive halving and doubling: as few bytes for a power of two, 2 log2(n) rounds
    time_s                          the alpha-beta model of all of them

Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 4; Patarasuk and Yuan 2009
for the ring. Everything works in place on contiguous tensors, and for any number n of ranks.
"""

import math

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv

COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def exchange(
    group: Group,
    send: tuple[Tensor, int] | None = None,
    recv: tuple[Tensor, int] | None = None,
    op: str | None = None,
) -> None:
    """Send one tensor and receive another, each (tensor, peer), at once, so that their order cannot deadlock; wait.

    What arrives overwrites recv's tensor, or is combined with it by the reduction `op`.
    """
    transfers = [P2POp("send", *send)] if send else []
    if recv:
        target, peer = recv
        received = torch.empty_like(target) if op else target
        transfers.append(P2POp("recv", received, peer))
    batch_send_recv([each for each in transfers if each.tensor.numel()], group)
    if recv and op:
        COMBINE[op](target, received, out=target)


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with rank `src`'s. In each round, every rank that has it sends it to one more."""
    size = group.size
    place = (group.rank - src) % size  # counted from the root
    distance = 1
    while distance < size:  # the places below `distance` have the tensor
        if place < distance and place + distance < size:
            exchange(group, send=(tensor, (group.rank + distance) % size))
        elif distance <= place < 2 * distance:
            exchange(group, recv=(tensor, (group.rank - distance) % size))
        distance *= 2


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: reduce all ranks' `tensor` into rank `dst`'s; the other ranks' end up partially reduced.

    The rounds of `tree_broadcast` in the opposite order, each with its senders and receivers exchanged.
    """
    size = group.size
    place = (group.rank - dst) % size
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if distance <= place < 2 * distance:
            exchange(group, send=(tensor, (group.rank - distance) % size))
        elif place < distance and place + distance < size:
            exchange(group, recv=(tensor, (group.rank + distance) % size), op=op)
        distance //= 2


def tree_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place, up a tree to rank 0 and down again."""
    tree_reduce(tensor, 0, group, op)
    tree_broadcast(tensor, 0, group)


def ring_reduce_scatter(chunks: list[Tensor], group: Group, op: str = "sum") -> None:
    """Collective: reduce in place; afterwards `chunks[rank]` is fully reduced, the others partially.

    chunks: one per rank, of the same lengths on all ranks. Chunk c starts on the rank after c, in the direction in
    which it goes round, and every rank that it passes adds its own values.
    """
    size, rank = group.size, group.rank
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - 1 - step) % size], chunks[(rank - 2 - step) % size]
        exchange(group, send=(outgoing, (rank + 1) % size), recv=(incoming, (rank - 1) % size), op=op)


def ring_all_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: each rank's `chunks[rank]` goes round the ring, until all ranks have all chunks."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        exchange(group, send=(outgoing, (rank + 1) % size), recv=(incoming, (rank - 1) % size))


def ring_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by reduce-scatter and all-gather on a ring.

    All ranks get the same bits, as each chunk is reduced once and then copied. The order of the additions depends on
    the chunk.
    """
    chunks = list(tensor.view(-1).tensor_split(group.size))  # lengths differ by at most one, and may be 0
    ring_reduce_scatter(chunks, group, op)
    ring_all_gather(chunks, group)


def halving_doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by recursive halving and doubling.

    Both need a power of two of ranks. Of n ranks, each surplus one first gives its tensor to a neighbour, and gets the
    result from it in the end (Rabenseifner 2004): ranks 1, 3, ... are folded into ranks 0, 2, ... until a power of two
    of ranks is left.
    """
    flat, rank = tensor.view(-1), group.rank
    largest_power = 1 << (group.size.bit_length() - 1)
    num_pairs = group.size - largest_power
    is_paired = rank < 2 * num_pairs
    if is_paired and rank % 2:
        exchange(group, send=(flat, rank - 1))
        exchange(group, recv=(flat, rank - 1))
        return
    if is_paired:
        exchange(group, recv=(flat, rank + 1), op=op)
    active = [*range(0, 2 * num_pairs, 2), *range(2 * num_pairs, group.size)]
    halve_and_double(flat, active, group, op)
    if is_paired:
        exchange(group, send=(flat, rank + 1))


def halve_and_double(flat: Tensor, ranks: list[int], group: Group, op: str) -> None:
    """Collective over `ranks`, a power of two of them: all-reduce `flat` (n,) in place.

    Halving: a rank and its partner in the other half of `ranks` each send one half of their tensor, and reduce the half
    that they receive; each half of `ranks` then repeats this with its own half of the tensor. Doubling: on the way back
    the partners exchange their reduced halves.
    """
    if len(ranks) == 1:
        return
    index, middle = ranks.index(group.rank), len(ranks) // 2
    partner = ranks[(index + middle) % len(ranks)]
    near, far = flat.tensor_split(2)
    kept, sent = (near, far) if index < middle else (far, near)
    exchange(group, send=(sent, partner), recv=(kept, partner), op=op)
    halve_and_double(kept, ranks[:middle] if index < middle else ranks[middle:], group, op)
    exchange(group, send=(kept, partner), recv=(sent, partner))


ALL_REDUCE = {"tree": tree_all_reduce, "ring": ring_all_reduce, "doubling": halving_doubling_all_reduce}


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
