"""Synthetic text from a source of known entropy rate, so that the best possible loss is known.

An order-2 Markov chain over 32 printable bytes: each context (a, b) has a table of 256 slots, each slot holds a symbol,
and every draw picks a slot uniformly. Probabilities are exact multiples of 1/256, and tables and draws are hashes, so
the text is the same on every machine. The 256 slots of a context:

    160 hold four symbols that depend on b, 40 slots each   learnable by a bigram model
     64 hold one symbol that depends on (a, b)              learnable only with a context of two symbols
     32 hold every symbol once                              every symbol is possible: finite loss, and the chain mixes
"""

from itertools import accumulate

import numpy as np

from minidist.hashing import hash64

ALPHABET = b" abcdefghijklmnopqrstuvwxyz.,;:\n"
_N = len(ALPHABET)
_SLOTS = 256
_PAIR, _SINGLE, _DRAW = 1, 2, 3  # second field of a hash: its purpose


def transition_table(seed: int = 0) -> np.ndarray:
    """Return the symbol (0..31) that follows each pair (a, b) for each of 256 equally likely draws, (32, 32, 256)."""
    a, b, favourite = np.arange(_N)[:, None, None], np.arange(_N)[None, :, None], np.arange(4)
    of_b = np.repeat(_symbol(seed, _SINGLE, b, favourite), 40, axis=2)  # (1, 32, 160)
    of_pair = np.repeat(_symbol(seed, _PAIR, a, b), 64, axis=2)  # (32, 32, 64)
    each = np.arange(_N, dtype=np.uint8)
    parts = [np.broadcast_to(part, (_N, _N, part.shape[-1])) for part in (of_b, of_pair, each)]
    return np.concatenate(parts, axis=2)


def _symbol(*address: int | np.ndarray) -> np.ndarray:
    """Hash `address` to a symbol; the minimum of two draws, so that a unigram model has something to learn."""
    throws = hash64(*address)
    return np.minimum(throws >> np.uint64(59), (throws >> np.uint64(54)) & np.uint64(_N - 1)).astype(np.uint8)


def generate_text(length: int, seed: int = 0, stream: int = 0) -> np.ndarray:
    """Generate `length` bytes of the source, (length,) uint8.

    seed: of the source's probabilities and of the text. stream: the number of the text; texts with different numbers
    are independent, with the same probabilities. A shorter text is a prefix of a longer one.
    """
    # The state is a * 32 + b, so state % 32 is the newest symbol; next_state[state * 256 + slot] is one list lookup.
    b = np.tile(np.arange(_N), _N)[:, None]
    next_state = (b * _N + transition_table(seed).reshape(_N * _N, _SLOTS)).ravel().tolist()
    draws = hash64(seed, _DRAW, stream, np.arange(length)) >> np.uint64(56)  # 0..255
    states = accumulate(draws.tolist(), lambda state, slot: next_state[state * _SLOTS + slot], initial=0)
    symbols = np.fromiter(states, np.int64, length + 1)[1:] % _N
    return np.frombuffer(ALPHABET, np.uint8)[symbols]


def transition_probabilities(seed: int = 0) -> np.ndarray:
    """Return P(next = c | previous two = a, b) as [a, b, c], (32, 32, 32) float64, exact multiples of 1/256."""
    table = transition_table(seed)
    return np.stack([(table == c).sum(axis=2) for c in range(_N)], axis=2) / _SLOTS


def entropy_rate(seed: int = 0, context_len: int = 2) -> float:
    """Return the expected loss, in nats per token, of the best model with `context_len` previous tokens.

    With context_len 2 it is the entropy rate of the source: no model's expected loss is below it. Cover and Thomas,
    Elements of Information Theory, 2nd edition, section 4.2. Raises ValueError for a negative context_len.
    """
    if context_len < 0:
        raise ValueError(f"context_len={context_len}: a model sees 0 or more previous tokens")
    p = transition_probabilities(seed)
    triples = stationary_pair_distribution(p)[:, :, None] * p  # P(a, b, c)
    joint = triples if context_len >= 2 else triples.sum(axis=0) if context_len == 1 else triples.sum(axis=(0, 1))
    given = joint / joint.sum(axis=-1, keepdims=True)
    return float(-(joint * np.log(given, out=np.zeros_like(given), where=joint > 0)).sum())


def stationary_pair_distribution(transitions: np.ndarray) -> np.ndarray:
    """Return how often each pair (a, b) of consecutive symbols occurs in an endless text, (32, 32) float64.

    transitions: P(next = c | previous two = a, b) as [a, b, c], (32, 32, 32). Uses power iteration.
    """
    pairs = np.full((_N, _N), 1 / _N**2)
    # Any two steps forget the past with probability (32/256)**2, so 64 ln(1e16) < 2400 pairs of steps always suffice.
    for _ in range(4800):
        step = np.einsum("ab,abc->bc", pairs, transitions)
        if np.abs(step - pairs).sum() < 1e-15:
            return step
        pairs = step
    return pairs
