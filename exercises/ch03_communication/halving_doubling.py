"""Recursive halving and doubling.

Write the all-reduce with as few bytes as the ring and only 2 log2(ranks) rounds: halve_and_double for a power of two of
ranks, and halving_doubling_all_reduce, which folds any other number onto a power of two first. The trainer runs it for
`--comm.algorithm doubling`.

halve_and_double: flat (n,), reduced in place by `op` over `ranks`, a list of group ranks whose length is a power of
two; only they call it, all with the same list. Each pairs with the rank half a list away. The partners agree on two
halves of flat; each sends the half that the other keeps, and reduces what arrives into its own. Each half of the list
then all-reduces its half of flat in the same way; at the end the partners send each other what they kept.
halving_doubling_all_reduce: tensor, contiguous, of any shape and size; called by all ranks of the group. If their
number is not a power of two, as many of the ranks 1, 3, ... as are surplus first give their tensors to the ranks 0, 2,
..., and get the result in the end. Other partners are right, too, if all ranks together send no more bytes, and no rank
more than 2 log2(p) messages, one more if there are surplus ranks. p is the largest power of two up to group.size.
op: "sum", "max", "min" or "product". Both return None.
Example: 4 ranks with the tensors [1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400] and [1000, 2000, 3000, 4000].
    round 1, 0 with 2 and 1 with 3: ranks 0, 1 keep [101, 202] and [1010, 2020], ranks 2, 3 [303, 404] and [3030, 4040]
    round 2, 0 with 1 and 2 with 3: ranks 0 to 3 keep [1111], [2222], [3333] and [4444]
    round 3, the partners of round 2: [1111, 2222] on ranks 0 and 1; round 4: all four elements on every rank

Checked: values on 1 to 7 ranks, for every op, dtype, size and group; halve_and_double over one, two and four of four
ranks, in any order; that all ranks get the same bits; the number of messages that each rank sends, and the elements
that all ranks together send.

You may call:
    exchange(group, send=(tensor, peer), recv=(tensor, peer), op=op)   one round; each of the three may be left out;
        peers are group ranks; what arrives overwrites recv's tensor or, with op, is reduced into it; sends and receives
        at once, and skips empty tensors
    group.rank, group.size   this rank's index in the group, and the number of ranks in it
    tensor.view(-1), tensor.tensor_split(2)   views: one of shape (numel,); its two halves
    n.bit_length()   the number of bits of n: 1 << (n.bit_length() - 1) is the largest power of two that is not above n

Check it with: python -m exercises check halving_doubling

Stub de5e11a0.
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
    raise NotImplementedError("exchange halves, reduce the kept half over half of the ranks, exchange the results")


def halving_doubling_all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> None:
    """Collective: all-reduce `tensor` (any shape, any size) in place, by recursive halving and doubling.

    Both need a power of two of ranks. Of n ranks, each surplus one first gives its tensor to a neighbour, and gets the
    result from it in the end (Rabenseifner 2004): ranks 1, 3, ... are folded into ranks 0, 2, ... until a power of two
    of ranks is left.
    """
    raise NotImplementedError("fold the surplus ranks, halve and double over the others, give the result back")
