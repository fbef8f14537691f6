"""Collectives from send and receive: how an all-reduce moves its bytes, and what that costs on a link.

    tree_broadcast, tree_reduce     a binomial tree: log2(n) rounds, in each of which the whole tensor is sent
    ring_all_reduce                 a ring: 2 (n - 1) rounds, but only 2 (n - 1) / n of the tensor per rank
    halving_doubling_all_reduce     recursive halving and doubling: as few bytes, in 2 log2(n) rounds
    time_s                          the alpha-beta model of all of them

Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 4; Patarasuk and Yuan 2009
for the ring. Everything works in place on contiguous tensors, and for any number n of ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv

COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def exchange(group: Group, send: Sequence[tuple[Tensor, int]] = (), recv: Sequence[tuple[Tensor, int]] = ()) -> None:
    """Send and receive some (tensor, peer), all at once, so that no order of them can deadlock; wait for all."""
    transfers = [P2POp("send", tensor, peer) for tensor, peer in send if tensor.numel()]
    transfers += [P2POp("recv", tensor, peer) for tensor, peer in recv if tensor.numel()]
    batch_send_recv(transfers, group)


def split_chunks(flat: Tensor, num_chunks: int) -> list[Tensor]:
    """Split a tensor (n,) into consecutive views, whose lengths differ by at most one and may be 0."""
    return list(flat.tensor_split(num_chunks))


# -- tree -------------------------------------------------------------------------------------------------------------


def tree_broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """Collective: overwrite `tensor` with rank `src`'s. In each round, every rank that has it sends it to one more."""
    flat, size = tensor.view(-1), group.size
    place = (group.rank - src) % size  # counted from the root
    distance = 1
    while distance < size:  # the places below `distance` have the tensor
        if place < distance and place + distance < size:
            exchange(group, send=[(flat, (group.rank + distance) % size)])
        elif distance <= place < 2 * distance:
            exchange(group, recv=[(flat, (group.rank - distance) % size)])
        distance *= 2


def tree_reduce(tensor: Tensor, dst: int, group: Group, op: str = "sum") -> None:
    """Collective: reduce all ranks' `tensor` into rank `dst`'s; the other ranks' end up partially reduced.

    The broadcast backwards: in each round the far half of the places sends to the near half.
    """
    flat, size = tensor.view(-1), group.size
    place = (group.rank - dst) % size
    received = torch.empty_like(flat)
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if distance <= place < 2 * distance:
            exchange(group, send=[(flat, (group.rank - distance) % size)])
        elif place < distance and place + distance < size:
            exchange(group, recv=[(received, (group.rank + distance) % size)])
            COMBINE[op](flat, received, out=flat)
        distance //= 2


# -- ring -------------------------------------------------------------------------------------------------------------


def ring_reduce_scatter(chunks: list[Tensor], group: Group, op: str = "sum") -> None:
    """Collective: reduce in place; afterwards `chunks[rank]` is fully reduced, the others partially.

    chunks: one per rank, of the same lengths on all ranks. Chunk c starts on rank c + 1, and every rank on its way adds
    its own values.
    """
    size, rank = group.size, group.rank
    received = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - 1 - step) % size], chunks[(rank - 2 - step) % size]
        part = received[: incoming.numel()]
        exchange(group, send=[(outgoing, (rank + 1) % size)], recv=[(part, (rank - 1) % size)])
        COMBINE[op](incoming, part, out=incoming)


def ring_all_gather(chunks: list[Tensor], group: Group) -> None:
    """Collective: each rank's `chunks[rank]` goes round the ring, until all ranks have all chunks."""
    size, rank = group.size, group.rank
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - 1 - step) % size]
        exchange(group, send=[(outgoing, (rank + 1) % size)], recv=[(incoming, (rank - 1) % size)])


def ring_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by reduce-scatter and all-gather on a ring.

    All ranks get the same bits, as each chunk is reduced once and then copied. The order of the additions depends on
    the chunk.
    """
    chunks = split_chunks(tensor.view(-1), group.size)
    ring_reduce_scatter(chunks, group, op)
    ring_all_gather(chunks, group)


# -- halving and doubling ---------------------------------------------------------------------------------------------


def halving_doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by recursive halving and doubling.

    Both need a power of two of ranks. Of n ranks, each surplus one first gives its tensor to a neighbour, and gets the
    result from it in the end (Rabenseifner 2004): ranks 0 and 1, 2 and 3, ... become one until a power of two is left.
    """
    flat = tensor.view(-1)
    num_active = 1 << (group.size.bit_length() - 1)
    num_pairs = group.size - num_active
    is_paired = group.rank < 2 * num_pairs
    if is_paired and group.rank % 2:
        exchange(group, send=[(flat, group.rank - 1)])
    else:
        if is_paired:
            received = torch.empty_like(flat)
            exchange(group, recv=[(received, group.rank + 1)])
            COMBINE[op](flat, received, out=flat)
        # The active ranks: one of each pair, and all that are in no pair.
        ranks = [*range(0, 2 * num_pairs, 2), *range(2 * num_pairs, group.size)]
        halve_and_double(flat, ranks, group, op)
    if is_paired and group.rank % 2:
        exchange(group, recv=[(flat, group.rank - 1)])
    elif is_paired:
        exchange(group, send=[(flat, group.rank + 1)])


def halve_and_double(flat: Tensor, ranks: list[int], group: Group, op: str) -> None:
    """Collective over `ranks`, a power of two of them: all-reduce `flat` (n,) in place.

    Halving: in each round a rank keeps one half of its range of chunks, sends the other half to its partner, and adds
    what the partner sends. Doubling: the same exchanges in reverse order, of reduced chunks.
    """
    index, chunks = ranks.index(group.rank), split_chunks(flat, len(ranks))
    bounds = [0]
    for chunk in chunks:
        bounds.append(bounds[-1] + chunk.numel())

    def chunk_range(start: int, length: int) -> Tensor:
        return flat[bounds[start] : bounds[start + length]]

    received = torch.empty_like(flat)
    distance = len(ranks) // 2
    while distance:
        partner = index ^ distance
        kept = chunk_range(index // distance * distance, distance)
        sent = chunk_range(partner // distance * distance, distance)
        part = received[: kept.numel()]
        exchange(group, send=[(sent, ranks[partner])], recv=[(part, ranks[partner])])
        COMBINE[op](kept, part, out=kept)
        distance //= 2
    distance = 1
    while distance < len(ranks):
        partner = index ^ distance
        have = chunk_range(index // distance * distance, distance)
        lack = chunk_range(partner // distance * distance, distance)
        exchange(group, send=[(have, ranks[partner])], recv=[(lack, ranks[partner])])
        distance *= 2


# -- cost -------------------------------------------------------------------------------------------------------------


def time_s(algorithm: str, num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return the modelled time of an all-reduce: rounds * latency + bytes sent by one rank / bandwidth.

    algorithm: "tree", "ring" or "halving_doubling". The model has no contention: every rank has a link of its own.
    """
    rounds = math.ceil(math.log2(num_ranks)) if num_ranks > 1 else 0
    sent = num_bytes * (num_ranks - 1) / num_ranks
    match algorithm:
        case "tree":
            return 2 * rounds * (latency_s + num_bytes / bytes_per_s)
        case "ring":
            return 2 * (num_ranks - 1) * latency_s + 2 * sent / bytes_per_s
        case "halving_doubling":
            return 2 * rounds * latency_s + 2 * sent / bytes_per_s
    raise ValueError(f"no algorithm {algorithm!r}: possible are tree, ring and halving_doubling")
