"""Recursive halving and doubling: ranks exchange with partners at distance 1, 2, 4, ..., in log2(size) rounds.

Recursive halving is a reduce-scatter, recursive doubling an all-gather. Rabenseifner's all-reduce is one after the
other: as few bytes as the ring, in 2 log2(size) rounds. `doubling_all_reduce` exchanges the full buffer every round:
more bytes, half the rounds, and so the fastest for small tensors.

Both need a power of two of ranks; `PowerOfTwoRanks` folds any other number onto one. Thakur et al. 2005, sections 4.1
(recursive doubling), 4.4 (recursive halving), 4.5 (all-reduce); Rabenseifner 2004.
"""

import torch
from torch import Tensor

from minidist.comm.algorithms.primitives import check_reduce_op, divide_mean, exchange, flat_view, reduce_into
from minidist.comm.collectives import check_shard_sizes
from minidist.comm.group import Group
from minidist.comm.power_of_two import PowerOfTwoRanks
from minidist.comm.wire_bytes import chunk_sizes


def fold_extra_ranks(buffer: Tensor, active: PowerOfTwoRanks, group: Group, op: str) -> None:
    """Collective: reduce each folded rank's `buffer` (n,) into its active partner's (see `PowerOfTwoRanks`)."""
    if active.is_folded(group.rank):
        exchange(group, send=[(buffer, group.rank - 1)])
    elif (folded := active.folded_partner(group.rank)) is not None:
        arriving = torch.empty_like(buffer)
        exchange(group, recv=[(arriving, folded)])
        reduce_into(buffer, arriving, op)


def unfold_extra_ranks(buffer: Tensor, active: PowerOfTwoRanks, group: Group) -> None:
    """Collective: send each folded rank the result of its active partner, whose `buffer` (n,) overwrites its own.

    It ends what `fold_extra_ranks` began and does not undo it: folded ranks get results, not their inputs.
    """
    if active.is_folded(group.rank):
        exchange(group, recv=[(buffer, group.rank - 1)])
    elif (folded := active.folded_partner(group.rank)) is not None:
        exchange(group, send=[(buffer, folded)])


def recursive_halving(buffer: Tensor, bounds: list[int], active: PowerOfTwoRanks, group: Group, op: str) -> None:
    """Collective: reduce-scatter in place; active rank i ends with `buffer[bounds[i] : bounds[i + 1]]` fully reduced.

    buffer: (n,). bounds: the start of each active rank's shard, then n. active: see `PowerOfTwoRanks`; folded ranks
    return at once. In each round a rank keeps half of the range that it still reduces, sends the other half to its
    partner, and adds the partner's values to its own half.
    """
    if active.is_folded(group.rank):
        return
    index = active.index(group.rank)
    scratch = torch.empty_like(buffer)
    low, high = 0, active.count  # this rank still reduces the shards of active ranks low <= i < high
    while high - low > 1:
        middle = (low + high) // 2
        distance = middle - low
        first, second = buffer[bounds[low] : bounds[middle]], buffer[bounds[middle] : bounds[high]]
        if index < middle:
            partner, staying, leaving, high = index + distance, first, second, middle
        else:
            partner, staying, leaving, low = index - distance, second, first, middle
        peer, arriving = active.rank(partner), scratch[: staying.numel()]
        exchange(group, send=[(leaving, peer)], recv=[(arriving, peer)])
        reduce_into(staying, arriving, op)


def recursive_doubling(buffer: Tensor, bounds: list[int], active: PowerOfTwoRanks, group: Group) -> None:
    """Collective: all-gather in place; in each round two partners exchange all shards that they have gathered.

    The arguments are those of `recursive_halving`, whose exchanges run here in reverse order.
    """
    if active.is_folded(group.rank):
        return
    index, distance = active.index(group.rank), 1
    while distance < active.count:
        partner = index ^ distance  # in the other half of an aligned block of 2 * distance active ranks
        low, other = index - index % distance, partner - partner % distance
        have = buffer[bounds[low] : bounds[low + distance]]
        lack = buffer[bounds[other] : bounds[other + distance]]
        peer = active.rank(partner)
        exchange(group, send=[(have, peer)], recv=[(lack, peer)])
        distance *= 2


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: reduce `input` (size * n, ...), unchanged; `output` (n, ...) gets shard `rank` of the result."""
    check_shard_sizes("reduce_scatter", full=input, shard=output, group=group)
    check_reduce_op(op, input.dtype)
    active, n, rank = PowerOfTwoRanks(group.size), output.numel(), group.rank
    work, result = flat_view(input).clone(), flat_view(output)
    fold_extra_ranks(work, active, group, op)
    recursive_halving(work, [n * active.rank(index) for index in range(active.count + 1)], active, group, op)
    if active.is_folded(rank):
        exchange(group, recv=[(result, rank - 1)])
    else:
        if (folded := active.folded_partner(rank)) is not None:
            exchange(group, send=[(work[n * folded : n * (folded + 1)], folded)])
        result.copy_(work[n * rank : n * (rank + 1)])
    divide_mean(result, op, group.size)


def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Collective: concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...)."""
    check_shard_sizes("all_gather", full=output, shard=input, group=group)
    active, n, rank, buffer = PowerOfTwoRanks(group.size), input.numel(), group.rank, flat_view(output)
    buffer[n * rank : n * (rank + 1)].copy_(flat_view(input))
    folded = active.folded_partner(rank)
    if active.is_folded(rank):
        exchange(group, send=[(buffer[n * rank : n * (rank + 1)], rank - 1)])
    elif folded is not None:
        exchange(group, recv=[(buffer[n * folded : n * (folded + 1)], folded)])
    recursive_doubling(buffer, [n * active.rank(index) for index in range(active.count + 1)], active, group)
    # A folded rank already has its own shard: it receives what precedes it and what follows it.
    if active.is_folded(rank):
        exchange(group, recv=[(buffer[: n * rank], rank - 1), (buffer[n * (rank + 1) :], rank - 1)])
    elif folded is not None:
        exchange(group, send=[(buffer[: n * folded], folded), (buffer[n * (folded + 1) :], folded)])


def doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place; in each round partners exchange full tensors and add them.

    Both partners add the same two numbers, and a + b = b + a bit for bit, so all ranks get identical results. Unlike in
    the ring, the order of additions does not depend on an element's offset in the tensor.
    """
    check_reduce_op(op, tensor.dtype)
    buffer, active = flat_view(tensor), PowerOfTwoRanks(group.size)
    fold_extra_ranks(buffer, active, group, op)
    if not active.is_folded(group.rank):
        arriving, distance = torch.empty_like(buffer), 1
        while distance < active.count:
            peer = active.rank(active.index(group.rank) ^ distance)
            exchange(group, send=[(buffer, peer)], recv=[(arriving, peer)])
            reduce_into(buffer, arriving, op)
            distance *= 2
        divide_mean(buffer, op, group.size)
    unfold_extra_ranks(buffer, active, group)


def rabenseifner_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape) in place by recursive halving, then recursive doubling."""
    check_reduce_op(op, tensor.dtype)
    buffer, active = flat_view(tensor), PowerOfTwoRanks(group.size)
    lengths = chunk_sizes(buffer.numel(), active.count)
    bounds = [sum(lengths[:index]) for index in range(active.count + 1)]
    fold_extra_ranks(buffer, active, group, op)
    recursive_halving(buffer, bounds, active, group, op)
    if not active.is_folded(group.rank):
        index = active.index(group.rank)
        divide_mean(buffer[bounds[index] : bounds[index + 1]], op, group.size)
    recursive_doubling(buffer, bounds, active, group)
    unfold_extra_ranks(buffer, active, group)
