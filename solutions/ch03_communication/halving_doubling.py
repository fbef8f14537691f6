"""Recursive halving and doubling: the solution, as it stands in minidist.simple.collectives.

The number of ranks whose values are in a partial sum doubles in each round, so log2(p) rounds suffice, and the tensor
that is still to be reduced halves, so the rounds together send n/2 + n/4 + ... = n (p - 1) / p. The way back sends as
much. That is as little as the ring, in 2 log2(p) rounds instead of 2 (p - 1).

Each element is reduced completely on one rank and then copied, so all ranks get identical bits. If the number of
ranks is not a power of two, the surplus ranks send full tensors: two rounds and 2n bytes more on the busiest rank.
The ring needs no folding, so for large tensors on such numbers of ranks it is faster.

Usual wrong answers:
* sums, whatever `op` is
* the package's own algorithm
* the same number, whatever the inputs
* both halves have the same length, so the last element of an odd number is left out
* sums the surplus ranks' tensors, whatever `op` is
* partners exchange full tensors: fewer rounds, more bytes
* sums in float32, whatever the dtype of the tensor
* uses the index in the list as the partner's rank
* wrong only on the fourth rank
* stops after the halving: each rank has one part of the result
* the surplus ranks keep their own tensors
* one exchange only, over two ranks of four
* the library's all-reduce
* returns the tensor as well, so that its caller may take it for a new one
* a ring over the active ranks: as few bytes, but more rounds
* the surplus ranks get the result, but nobody adds their tensors
* `reshape` copies a tensor that is not contiguous, and the result is lost
* zeros
"""

from torch import Tensor

from minidist.comm import Group
from minidist.simple.collectives import exchange


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
