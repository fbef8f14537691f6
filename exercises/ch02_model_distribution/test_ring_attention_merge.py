"""Tests of ring_attention_merge: the reference is a softmax over all keys at once, in float64."""

import math

import torch

from exercises.testing import expect, test
from minidist.comm import all_gather_object

TOLERANCE = 1e-12  # means of a few dozen values of about 1, in float64 in another order


def draw(salt, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64).to(dtype)


def attention(query, key, value):
    """Return softmax-weighted values (..., q, d) and the log-sum-exp of the scores (..., q) over these keys."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    largest = scores.amax(-1, keepdim=True)
    sums = (scores - largest).exp().sum(-1, keepdim=True)
    return (scores - largest).exp() @ value / sums, (sums.log() + largest)[..., 0]


def case(scale=1.0):
    """A query (2, 3, 5, 4), and keys and values of 12 positions."""
    return scale * draw(1, 2, 3, 5, 4), scale * draw(2, 2, 3, 12, 4), draw(3, 2, 3, 12, 4)


@test(points=4)
def merge_equals_attention_over_all_keys(answer):
    """Merging the results over two sets of keys, of any sizes, gives attention over both sets."""
    query, key, value = case()
    whole, whole_lse = attention(query, key, value)
    for cut in (6, 1, 11):
        one = attention(query, key[..., :cut, :], value[..., :cut, :])
        other = attention(query, key[..., cut:, :], value[..., cut:, :])
        kept = [tensor.clone() for tensor in (*one, *other)]
        out, lse = answer.merge_attention(*one, *other)
        sizes = f"{cut} keys and {12 - cut} keys"
        expect("the output", out, whole, tolerance=TOLERANCE, case=sizes)
        expect("the log-sum-exp", lse, whole_lse, tolerance=TOLERANCE, case=sizes)
        expect("the arguments, afterwards", [*one, *other], kept, case=sizes)


@test(points=3)
def large_scores(answer):
    """Scores in the thousands neither overflow nor lose the smaller contribution."""
    query, key, value = case(60.0)
    whole, whole_lse = attention(query, key, value)
    one, other = (attention(query, key[..., part, :], value[..., part, :]) for part in (slice(0, 5), slice(5, 12)))
    out, lse = answer.merge_attention(*one, *other)
    expect("the output", out, whole, tolerance=1e-9)  # lse of 1e4 has 12 digits after the point
    expect("the log-sum-exp", lse, whole_lse, tolerance=1e-9)
    out, lse = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([-2000.0], dtype=torch.float64)
    out, lse = answer.merge_attention(out, lse, out + 4, lse)
    expect("the output of two equal results with scores of -2000", out, [[2.0, 2.0]], tolerance=TOLERANCE)
    expect("their log-sum-exp", lse, [-2000 + math.log(2)], tolerance=1e-9)


@test(points=3)
def results_over_no_keys(answer):
    """A result over no keys (log-sum-exp of minus infinity) contributes nothing, as either argument or both."""
    query, key, value = case()
    out, lse = attention(query, key, value)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for case_name, got in {
        "no keys, then keys": answer.merge_attention(*nothing, out, lse),
        "keys, then no keys": answer.merge_attention(out, lse, *nothing),
    }.items():
        expect("the output", got[0], out, tolerance=TOLERANCE, case=case_name)
        expect("the log-sum-exp", got[1], lse, tolerance=TOLERANCE, case=case_name)
    got = answer.merge_attention(*nothing, *nothing)
    expect("the output of two results over no keys", got[0], nothing[0])
    expect("its log-sum-exp", got[1], nothing[1])


@test(points=2)
def merged_in_at_least_float32(answer):
    """16-bit results are merged in at least float32; float64 stays float64."""
    query, key, value = case()
    one, other = (attention(query, key[..., part, :], value[..., part, :]) for part in (slice(0, 5), slice(5, 12)))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        narrow = [one[0].to(dtype), one[1].to(wide), other[0].to(dtype), other[1].to(wide)]
        out, lse = answer.merge_attention(*narrow)
        expect(f"the dtypes for {dtype} outputs", [str(out.dtype), str(lse.dtype)], [str(wide)] * 2)
        exact, _ = answer.merge_attention(*(tensor.double() for tensor in narrow))
        eps = 0.0 if wide == torch.float64 else 1e-5  # float32 rounds at 1e-7, of values of about 1
        expect(f"the output of {dtype} results", out.double(), exact, tolerance=eps)


@test(points=2, ranks=(2, 3))
def blocks_of_all_ranks_in_any_order(answer, world, network):
    """Each rank merges the blocks of all ranks, beginning with its own, and all ranks get one result."""
    query, key, value = case()
    width = 12 // world.size
    blocks = [slice(width * rank, width * (rank + 1)) for rank in range(world.size)]
    mine = attention(query, key[..., blocks[world.rank], :], value[..., blocks[world.rank], :])
    of_ranks = all_gather_object([tensor.tolist() for tensor in mine], network.group)
    out, lse = torch.zeros_like(mine[0]), torch.full_like(mine[1], -torch.inf)
    for step in range(world.size):
        block = of_ranks[(world.rank - step) % world.size]
        out, lse = answer.merge_attention(out, lse, *(torch.tensor(tensor, dtype=torch.float64) for tensor in block))
    whole, whole_lse = attention(query, key, value)
    expect("the output", out, whole, tolerance=TOLERANCE)
    expect("the log-sum-exp", lse, whole_lse, tolerance=TOLERANCE)
