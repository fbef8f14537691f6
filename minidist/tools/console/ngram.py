"""Unigram and bigram baselines: the losses that a trained model has to beat.

Both are fitted on the training split and scored on the held-out one, in nats per token. Probabilities are smoothed by
adding K to every count (Lidstone): P(b | a) = (count(a, b) + K) / (count(a) + K * vocab_size).
"""

import numpy as np

from minidist.data.corpus import Corpus

K = 0.01  # small: from a megabyte of text on the loss hardly depends on it (see tests), but unseen pairs stay finite
_DENSE = 4096  # up to this vocabulary a table of all pairs fits (4096**2 counts are 128 MiB)
_CHUNK = 1 << 22  # tokens counted at once, so that memory does not grow with the text


def ngram_losses(corpus: Corpus, k: float = K) -> dict[str, float]:
    """Fit a unigram and a bigram model to a corpus's training split; return their losses on its held-out split.

    Returns {"unigram": ..., "bigram": ...}, in nats per token. k: added to every count, to smooth the probabilities.
    """
    return {
        "unigram": unigram_loss(corpus.train, corpus.held_out, corpus.vocab_size, k),
        "bigram": bigram_loss(corpus.train, corpus.held_out, corpus.vocab_size, k),
    }


def unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int, k: float = K) -> float:
    """Fit a unigram model to `train`; return its mean cross-entropy over held_out[1:], in nats per token.

    train, held_out: token ids, (tokens,). k: added to every token's count. The first token is left out, because a
    bigram model cannot predict it.
    """
    seen, scored = _count_tokens(train, vocab_size), _count_tokens(held_out[1:], vocab_size)
    return _mean_cross_entropy(scored, seen + k, np.float64(seen.sum() + k * vocab_size))


def bigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int, k: float = K) -> float:
    """Fit a bigram model to `train`; return its mean cross-entropy over held_out[1:], in nats per token.

    Each token is predicted from the one before it. train, held_out: token ids, (tokens,), at least 2. k: added to every
    pair's count. A vocabulary above 4096 ids is counted sparsely: only the pairs that occur take memory.
    """
    codes, seen = count_pairs(train, vocab_size)
    scored_codes, scored = count_pairs(held_out, vocab_size)
    contexts = _count_tokens(train[:-1], vocab_size)[scored_codes // vocab_size]  # count(a) for each pair to score
    at = np.minimum(np.searchsorted(codes, scored_codes), codes.size - 1)
    pairs = np.where(codes[at] == scored_codes, seen[at], 0)  # count(a, b), 0 where training never saw the pair
    return _mean_cross_entropy(scored, pairs + k, contexts + k * vocab_size)


def count_pairs(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the pairs (a, b) of consecutive tokens; return codes a * vocab_size + b, ascending, and the count of each.

    Both results are (distinct pairs,) int64. Raises ValueError for fewer than two tokens.
    """
    if tokens.size < 2:
        raise ValueError(f"{tokens.size} tokens contain no pair: at least 2 are needed")
    spans = [tokens[i : i + _CHUNK + 1] for i in range(0, tokens.size - 1, _CHUNK)]  # neighbours share one token
    chunks = (span[:-1].astype(np.int64) * vocab_size + span[1:].astype(np.int64) for span in spans)
    if vocab_size <= _DENSE:
        table = sum((np.bincount(chunk, minlength=vocab_size**2) for chunk in chunks), 0)
        codes = np.flatnonzero(table)
        return codes, table[codes]
    codes, counts = zip(*(np.unique(chunk, return_counts=True) for chunk in chunks), strict=True)
    merged, where = np.unique(np.concatenate(codes), return_inverse=True)
    return merged, np.bincount(where, weights=np.concatenate(counts)).astype(np.int64)  # float64 is exact below 2**53


def _count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each token occurs, (vocab_size,) int64. Counts in chunks, to save memory."""
    chunks = (tokens[i : i + _CHUNK] for i in range(0, tokens.size, _CHUNK))
    return sum(
        (np.bincount(chunk.astype(np.int64), minlength=vocab_size) for chunk in chunks), np.zeros(vocab_size, np.int64)
    )


def _mean_cross_entropy(scored: np.ndarray, numerator: np.ndarray, denominator: np.ndarray) -> float:
    """Return the mean of -log(numerator / denominator), each weighted by its number in `scored`."""
    return float(scored @ (np.log(denominator) - np.log(numerator)) / scored.sum())
