"""Unigram and bigram baselines against counting by hand, and against a source whose entropies are known."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.data import corpus
from minidist.tools.console import ngram
from minidist.tools.console.entropy import entropy_rate

texts = st.lists(st.integers(0, 6), min_size=2, max_size=60).map(np.array)


def losses_by_hand(train, held_out, vocab_size, k):
    train, held_out = train.tolist(), held_out.tolist()
    single, before, pairs = Counter(train), Counter(train[:-1]), Counter(zip(train, train[1:], strict=False))
    targets = list(zip(held_out, held_out[1:], strict=False))
    unigram = [-math.log((single[b] + k) / (len(train) + k * vocab_size)) for _, b in targets]
    bigram = [-math.log((pairs[a, b] + k) / (before[a] + k * vocab_size)) for a, b in targets]
    return {"unigram": sum(unigram) / len(targets), "bigram": sum(bigram) / len(targets)}


def as_corpus(train, held_out, vocab_size):
    return corpus.Corpus("test", "a test", train, held_out, vocab_size, "")


@pytest.mark.parametrize("dense", [4096, 0])
@pytest.mark.parametrize("chunk", [1 << 22, 7])
@settings(max_examples=60, deadline=None)
@given(train=texts, held_out=texts, k=st.sampled_from([1.0, 0.01]))
def test_losses_are_those_of_counting_by_hand(dense, chunk, train, held_out, k):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_DENSE", dense)
        patch.setattr(ngram, "_CHUNK", chunk)
        ours = ngram.ngram_losses(as_corpus(train, held_out, 7), k)
    # At most 59 terms below ln(60 / 0.01) < 9, summed in another order: 59 * 9 float64 epsilons are about 1e-13.
    assert ours == pytest.approx(losses_by_hand(train, held_out, 7, k), abs=1e-12)


def test_a_vocabulary_of_100000_needs_no_table_of_all_pairs():
    generator = np.random.default_rng(0)
    train, held_out = generator.integers(0, 100_000, (2, 2000), dtype=np.uint32)
    ours = ngram.ngram_losses(as_corpus(train, held_out, 100_000))
    assert ours == pytest.approx(losses_by_hand(train, held_out, 100_000, ngram.K), abs=1e-10)


def test_probabilities_of_all_tokens_sum_to_one():
    train = np.array([0, 1, 2, 1, 0, 0, 3])
    for a in range(5):  # 4 never occurs
        assert sum(math.exp(-ngram.bigram_loss(train, np.array([a, b]), 5)) for b in range(5)) == pytest.approx(1)
        assert sum(math.exp(-ngram.unigram_loss(train, np.array([a, b]), 5)) for b in range(5)) == pytest.approx(1)


def test_on_the_synthetic_text_both_reach_what_their_context_allows():
    loaded = corpus.make_synthetic_corpus()
    ours = ngram.ngram_losses(loaded)
    for name, context, freedoms in (("unigram", 0, 31), ("bigram", 1, 32 * 31)):
        # A fit on n tokens costs about freedoms / (2n) on fresh text. A loss per token lies within its range, at most
        # ln 256 + smoothing < 6, and neighbours are correlated over a few tokens (a factor of 3 in the deviation, by
        # far): six deviations of the mean over the held-out tokens.
        bound = freedoms / (2 * loaded.train.size) + 6 * 3 * 6 / 2 / math.sqrt(loaded.held_out.size)
        assert abs(ours[name] - entropy_rate(context_len=context)) < bound
    assert entropy_rate() + 0.3 < ours["bigram"] < ours["unigram"] - 0.3


def test_the_smoothing_constant_hardly_matters_on_a_megabyte():
    loaded = corpus.make_synthetic_corpus()
    losses = [ngram.bigram_loss(loaded.train, loaded.held_out, 256, k) for k in (0.1, ngram.K, 0.001)]
    # Smoothing adds between -ln(1 + k / count(a, b)) and ln(1 + 256 k / count(a)) to the loss of a pair. The rarest
    # symbol is 0.4 % of the text and each follows it once in 256: count(a) > 4000, count(a, b) about 16 and more, so
    # with k = 0.1 both are below 0.007 nats.
    assert max(losses) - min(losses) < 0.007


def test_on_python_sources_a_bigram_beats_a_unigram_and_both_beat_nothing():
    losses = ngram.ngram_losses(corpus.load_stdlib_corpus())
    assert 2.0 < losses["bigram"] < losses["unigram"] - 0.5 < math.log(256) - 1


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match="1 tokens"):
        ngram.bigram_loss(np.array([1]), np.array([1, 2]), 4)
