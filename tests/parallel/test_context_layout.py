"""Context parallelism without ranks: the tokens of each rank, the work of each step, and merging attention blocks."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from minidist.models.config import ModelConfig
from minidist.parallel.context import kernels
from minidist.parallel.context.causal import score_block
from minidist.parallel.context.chunks import resolve_layout
from minidist.parallel.context.kernels import merge_attention
from minidist.parallel.context.layout import rank_positions, shard_sequence
from minidist.tools.simulate.context_balance import load_balance_efficiency, scores_per_ring_step
from minidist.validation import validate_context_parallel

CONFIG = ModelConfig(48, 24, 36, 1, 12, 2, 64)


def test_positions_of_each_ranks_tokens():
    assert [rank_positions("contiguous", 12, 3, r).tolist() for r in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert [rank_positions("zigzag", 12, 3, r).tolist() for r in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert (
        rank_positions("zigzag", 5, 1, 0).tolist() == rank_positions("contiguous", 5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    )


def test_labels_are_sharded_like_their_tokens():
    text = torch.arange(2 * 13).view(2, 13)
    tokens, labels = shard_sequence(text[:, :-1], text[:, 1:], rank_positions("zigzag", 12, 3, 0))
    assert tokens.tolist() == [[0, 1, 10, 11], [13, 14, 23, 24]]
    assert torch.equal(labels, tokens + 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_blocks_of_all_ranks_cover_the_causal_mask_once(layout, size):
    """Over all ranks and steps, every unmasked score is computed once, and no masked one."""
    length = 48
    computed = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(size):
        for source in range(size):
            mine, theirs = (rank_positions(layout, length, size, r) for r in (rank, source))
            if what := score_block(layout, rank, source, length // size):
                rows, columns = mine[what.queries], theirs[what.keys]
                seen = torch.ones(len(rows), len(columns), dtype=torch.int64)
                computed[rows[:, None], columns] += seen.tril() if what.causal else seen
    assert torch.equal(computed, torch.ones(length, length, dtype=torch.int64).tril())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_zigzag_balances_the_load_exactly(size):
    for length in (2, 6, 30):
        contiguous, zigzag = (scores_per_ring_step(layout, size, length) for layout in ("contiguous", "zigzag"))
        assert load_balance_efficiency(contiguous) == Fraction(size, 2 * size - 1)
        assert load_balance_efficiency(zigzag) == 1
        assert all(len(set(step)) == 1 for step in zigzag)
        whole = length * size
        assert sum(map(sum, contiguous)) == sum(map(sum, zigzag)) == whole * whole / 2


def test_unknown_context_parallelism_and_layouts_are_refused():
    for call in (lambda: resolve_layout("star", None), lambda: validate_context_parallel(CONFIG, 24, 2, "star")):
        with pytest.raises(ValueError, match="there is no context parallelism 'star'; possible: ring, ulysses"):
            call()
    for call in (lambda: resolve_layout("ring", "snake"), lambda: rank_positions("snake", 24, 2, 0)):
        with pytest.raises(ValueError, match="there is no layout 'snake'; possible: contiguous, zigzag"):
            call()
    assert (resolve_layout("ring", None), resolve_layout("ulysses", None)) == ("zigzag", "contiguous")


@pytest.mark.parametrize(("arguments", "message"), [
    ((20, 4, "ring"), "seq_len=20 is not divisible into 8 equal chunks, as cp=4 needs in the zigzag layout "
     "(two chunks per rank); possible cp: 1, 2, 5, 10; or seq_len=24"),
    ((10, 4, "ring", "contiguous"), "seq_len=10 is not divisible into 4 equal chunks, as cp=4 needs in the "
     "contiguous layout (one chunk per rank); possible cp: 1, 2, 5, 10; or seq_len=12"),
    ((9, 2, "ulysses"), "seq_len=9 is not divisible into 2 equal chunks, as cp=2 needs in the contiguous layout"),
    ((40, 8, "ulysses"), "num_heads=12 over tp=1 leaves 12 query heads per rank, not divisible by cp=8 "
     "as ulysses needs; possible cp: 1, 2, 3, 4, 6, 12; or ring"),
    ((40, 4, "ulysses", None, 2), "num_heads=12 over tp=2 leaves 6 query heads per rank, not divisible by cp=4 "),
    ((24, 4, "ring", None, 4, True), "seq_len=24 over cp=4 leaves 6 tokens per rank, not divisible by tp=4 "
     "as sequence parallelism needs; seq_len=32 works"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(arguments, message):
    with pytest.raises(ValueError) as caught:
        validate_context_parallel(CONFIG, *arguments)
    assert message in str(caught.value)


def test_sizes_that_divide_are_accepted():
    validate_context_parallel(CONFIG, 7, 1, "ring")
    validate_context_parallel(CONFIG, 8, 4, "ring")
    validate_context_parallel(replace(CONFIG, num_kv_heads=1), 12, 4, "ulysses", None, 3)
    validate_context_parallel(CONFIG, 32, 4, "ring", None, 4, True)
    validate_context_parallel(CONFIG, 24, 4, "ring", None, 4)


def random_tensor(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_attention(query, key, value, mask=None):
    """Attention output and log-sum-exp by the formula; key and value have as many heads as query."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.exp()  # the scores of these tests are small
    return torch.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdim=True), value), weights.sum(-1).log()


def test_merging_two_blocks_of_keys_equals_full_attention():
    query, key, value = (
        random_tensor(2, 3, 4, 5),
        random_tensor(2, 3, 9, 5, seed=1, scale=3),
        random_tensor(2, 3, 9, 5, seed=2),
    )
    expected = reference_attention(query, key, value)
    for at in (1, 4, 8):
        first = reference_attention(query, key[:, :, :at], value[:, :, :at])
        second = reference_attention(query, key[:, :, at:], value[:, :, at:])
        for merged in (merge_attention(*first, *second), merge_attention(*second, *first)):
            for got, want in zip(merged, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-14)  # a handful of roundings of numbers near 1


def test_merging_an_empty_block_changes_nothing():
    out, lse = random_tensor(2, 3), random_tensor(2, seed=1)
    nothing = torch.zeros(2, 3, dtype=torch.float64), torch.full((2,), -torch.inf, dtype=torch.float64)
    for merged in (merge_attention(out, lse, *nothing), merge_attention(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    assert torch.equal(merge_attention(*nothing, *nothing)[0], nothing[0])
    assert torch.equal(merge_attention(*nothing, *nothing)[1], nothing[1])


def test_merging_does_not_overflow_and_uses_float32_for_16_bits():
    out, lse = merge_attention(torch.ones(1, 1), torch.tensor([3e4]), torch.zeros(1, 1), torch.tensor([3e4]))
    assert out.item() == 0.5
    assert lse.item() == pytest.approx(3e4 + math.log(2))
    out, _ = merge_attention(torch.ones(1, 1).bfloat16(), torch.zeros(1), torch.zeros(1, 1).bfloat16(), torch.zeros(1))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["of the device", "written out"])
@pytest.mark.parametrize("shape", [(2, 6, 2, 7, 5), (1, 1, 1, 1, 1), (1, 4, 1, 2, 3), (0, 2, 1, 4, 2)])
def test_block_gradients_add_up_to_those_of_full_attention(shape, kernel, monkeypatch):
    if kernel == "written out":
        monkeypatch.setattr(kernels, "_kernels", lambda _: (kernels._written, kernels._written_backward))
    b, heads, kv_heads, s, d = shape
    query = random_tensor(b, heads, s, d).requires_grad_()
    key, value = (random_tensor(b, kv_heads, 2 * s, d, seed=i).requires_grad_() for i in (1, 2))
    each = heads // kv_heads
    mask = torch.ones(s, 2 * s, dtype=torch.bool).tril(s)  # the first s keys lie in the past of every query
    expected, wanted_lse = reference_attention(query, *(x.repeat_interleave(each, 1) for x in (key, value)), mask)
    grad = random_tensor(*query.shape, seed=3)
    expected.backward(grad)

    blocks = [(slice(0, s), False), (slice(s, 2 * s), True)]
    with torch.no_grad():
        seen = [kernels.attention_forward(query, key[:, :, at], value[:, :, at], causal) for at, causal in blocks]
        out, lse = merge_attention(*seen[0], *seen[1])
        gradients = [
            kernels.attention_backward(grad, query, key[:, :, at], value[:, :, at], out, lse, causal)
            for at, causal in blocks
        ]
    # Sums of some ten terms near 1 in another order: 1e-14 is tens of roundings.
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, wanted_lse.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients[0][0] + gradients[1][0], query.grad, rtol=0, atol=1e-14)
    for i, whole in ((1, key), (2, value)):
        torch.testing.assert_close(torch.cat([g[i] for g in gradients], 2), whole.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", ["_flash", "_efficient"])
def test_cuda_kernels_accept_the_shapes_of_a_block(kernel):
    """Shapes and signatures only, on meta tensors: these kernels need a GPU to run."""
    dtype = torch.bfloat16 if kernel == "_flash" else torch.float32
    query, key, value = (torch.empty(2, 4, s, 5, dtype=dtype, device="meta") for s in (6, 3, 3))
    out, lse = getattr(kernels, f"{kernel}_forward")(query, key, value, False)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, (2, 4, 6), torch.float32)
    gradients = getattr(kernels, f"{kernel}_backward")(out, query, key, value, out, lse, False)
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
