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
    """Return the symbol (0..31) after each pair (a, b) for each of 256 equally likely draws, (32, 32, 256) uint8."""
    a = np.arange(_N)[:, None, None]
    b = np.arange(_N)[None, :, None]
    favourite = np.arange(4)
    of_b = np.repeat(_hash_to_symbols(seed, _SINGLE, b, favourite), 40, axis=2)  # (1, 32, 160)
    of_pair = np.repeat(_hash_to_symbols(seed, _PAIR, a, b), 64, axis=2)  # (32, 32, 64)
    each = np.arange(_N, dtype=np.uint8)
    parts = [np.broadcast_to(part, (_N, _N, part.shape[-1])) for part in (of_b, of_pair, each)]
    return np.concatenate(parts, axis=2)


def _hash_to_symbols(*address: int | np.ndarray) -> np.ndarray:
    """Hash each address, a tuple of integers or arrays, to a symbol 0..31, uint8.

    It is the minimum of two uniform draws, so that symbols differ in frequency and a unigram model has some to learn.
    """
    throws = hash64(*address)
    return np.minimum(throws >> np.uint64(59), (throws >> np.uint64(54)) & np.uint64(_N - 1)).astype(np.uint8)


def generate_text(length: int, seed: int = 0, stream: int = 0) -> np.ndarray:
    """Generate `length` bytes of synthetic text, (length,) uint8, from the Markov chain of `transition_table(seed)`.

    seed: determines the chain and the text. stream: the number of the text; texts with different numbers are
    independent. A shorter text is a prefix of a longer one.
    """
    # The state is a * 32 + b, so state % 32 is the newest symbol; next_state[state * 256 + slot] is one list lookup.
    b = np.tile(np.arange(_N), _N)[:, None]
    next_state = (b * _N + transition_table(seed).reshape(_N * _N, _SLOTS)).ravel().tolist()
    draws = hash64(seed, _DRAW, stream, np.arange(length)) >> np.uint64(56)  # 0..255
    states = accumulate(draws.tolist(), lambda state, slot: next_state[state * _SLOTS + slot], initial=0)
    symbols = np.fromiter(states, np.int64, length + 1)[1:] % _N
    return np.frombuffer(ALPHABET, np.uint8)[symbols]
