"""The entropy rate of the synthetic text (`data/synthetic.py`), which is the best possible loss on it."""

import numpy as np

from minidist.data.synthetic import transition_table


def transition_probabilities(seed: int = 0) -> np.ndarray:
    """Return the probabilities P(next = c | previous two = a, b) by which the synthetic text is generated.

    Returns [a, b, c], (32, 32, 32) float64, exact multiples of 1/256. seed: the seed of the text (`data/synthetic.py`).
    """
    table = transition_table(seed)
    return np.stack([(table == c).sum(axis=2) for c in range(len(table))], axis=2) / table.shape[2]


def entropy_rate(seed: int = 0, context_len: int = 2) -> float:
    """Return the lowest possible loss on the synthetic text of a model that sees `context_len` previous tokens.

    It is the expected loss of the best model, in nats per token. With context_len 2 or more it is the entropy rate of
    the text: no model's expected loss is below it. seed: the seed of the text. Cover and Thomas, Elements of
    Information Theory, 2nd edition, section 4.2. Raises ValueError for a negative context_len.
    """
    if context_len < 0:
        raise ValueError(f"context_len={context_len}: a model sees 0 or more previous tokens")
    p = transition_probabilities(seed)
    triples = stationary_pair_distribution(p)[:, :, None] * p  # P(a, b, c)
    joint = triples if context_len >= 2 else triples.sum(axis=0) if context_len == 1 else triples.sum(axis=(0, 1))
    given = joint / joint.sum(axis=-1, keepdims=True)
    return float(-(joint * np.log(given, out=np.zeros_like(given), where=joint > 0)).sum())


def stationary_pair_distribution(transitions: np.ndarray) -> np.ndarray:
    """Return the probability of each pair (a, b) of consecutive symbols in an endless text, (32, 32) float64.

    transitions: P(next = c | previous two = a, b) as [a, b, c], (32, 32, 32). Uses power iteration.
    """
    pairs = np.full((len(transitions),) * 2, 1 / len(transitions) ** 2)
    # Any two steps forget the past with probability (32/256)**2, so 64 ln(1e16) < 2400 pairs of steps always suffice.
    for _ in range(4800):
        step = np.einsum("ab,abc->bc", pairs, transitions)
        if np.abs(step - pairs).sum() < 1e-15:
            return step
        pairs = step
    return pairs
