"""The synthetic source: pinned bytes, and an entropy rate that long draws confirm."""

import hashlib
import math

import numpy as np
import pytest

from minidist.data import synthetic
from minidist.tools.console import entropy

LENGTH = 1_000_000
PINNED = "e5d59b27b9d6c38732d60ccaaaefce027265fa0a94c83e6b127dc7935595ec63"


@pytest.fixture(scope="module")
def draw():
    return synthetic.generate_text(LENGTH)


@pytest.fixture(scope="module")
def symbols(draw):
    rank = np.zeros(256, np.int64)
    rank[np.frombuffer(synthetic.ALPHABET, np.uint8)] = np.arange(32)
    return rank[draw]


def plug_in_entropy(codes: np.ndarray, contexts: np.ndarray) -> float:
    """Empirical H(code | context) in nats: the loss of the best model of that form, fitted on the very same text."""
    joint, context = np.unique(codes, return_counts=True)[1], np.unique(contexts, return_counts=True)[1]
    total = codes.size
    return float((context @ np.log(context) - joint @ np.log(joint)) / total)


def loss_deviation(p: np.ndarray) -> float:
    """Standard deviation per token of the true model's loss sum, exact for long texts.

    With h the solution of Poisson's equation (I - T) h = H(state) - H, loss - H + h(next) - h(state) is a martingale
    difference (Gordin's decomposition), so the loss sum varies as a sum of uncorrelated terms of that variance.
    """
    n = 32
    transition = np.zeros((n, n, n, n))
    a, b, c = np.ogrid[:n, :n, :n]
    transition[a, b, b, c] = p
    transition = transition.reshape(n * n, n * n)
    loss = -np.log(p)
    pi = entropy.stationary_pair_distribution(p)
    excess = (p * loss).sum(axis=2) - entropy.entropy_rate()
    potential = np.linalg.solve(np.eye(n * n) - transition + pi.ravel(), excess.ravel()).reshape(n, n)
    difference = loss - entropy.entropy_rate() + potential[None, :, :] - potential[:, :, None]
    return math.sqrt((pi[:, :, None] * p * difference**2).sum())


def test_the_text_is_pinned(draw):
    assert hashlib.sha256(draw.tobytes()).hexdigest() == PINNED
    assert draw.dtype == np.uint8


def test_the_text_is_printable(draw):
    assert len(set(synthetic.ALPHABET)) == 32
    assert set(draw.tobytes()) == set(synthetic.ALPHABET)
    assert draw.tobytes().decode("ascii").replace("\n", "").isprintable()


def test_a_short_text_begins_a_long_one(draw):
    assert np.array_equal(synthetic.generate_text(1000), draw[:1000])
    assert synthetic.generate_text(0).size == 0


def test_seeds_and_streams_give_other_texts(draw):
    for other in (synthetic.generate_text(1000, seed=1), synthetic.generate_text(1000, stream=1)):
        assert (other != draw[:1000]).mean() > 0.5


def test_probabilities_are_multiples_of_1_256_and_never_zero():
    p = entropy.transition_probabilities()
    assert np.array_equal(p * 256, np.round(p * 256))
    assert p.min() >= 1 / 256
    assert (p.sum(axis=2) == 1).all()  # exact: sums of multiples of 1/256


def test_the_stationary_distribution_is_the_eigenvector():
    p = entropy.transition_probabilities()
    matrix = np.zeros((32, 32, 32, 32))
    a, b, c = np.ogrid[:32, :32, :32]
    matrix[a, b, b, c] = p
    # Solving pi (T - I + 1) = 1 is another road to pi than iteration; both round at about 1024 float64 epsilons.
    solved = np.linalg.solve((matrix.reshape(1024, 1024) - np.eye(1024) + 1).T, np.ones(1024))
    assert np.abs(entropy.stationary_pair_distribution(p).ravel() - solved).max() < 1024 * np.finfo(np.float64).eps


def test_the_entropy_rate_of_a_long_text_is_the_computed_one(symbols):
    pairs = symbols[:-2] * 32 + symbols[1:-1]
    empirical = plug_in_entropy(pairs * 32 + symbols[2:], pairs)
    # The fitted model beats the true one on its own text by a chi-square of 1024 * 31 freedoms over 2n (Wilks), and
    # the true model's loss scatters around the rate by its exact deviation; six standard deviations of each.
    n, freedoms = symbols.size - 2, 1024 * 31
    scatter = 6 * loss_deviation(entropy.transition_probabilities()) / math.sqrt(n)
    overfit = (freedoms + 6 * math.sqrt(2 * freedoms)) / (2 * n)
    assert scatter + overfit < 0.03  # so the statement is about the second decimal
    assert -overfit - scatter < empirical - entropy.entropy_rate() < scatter


def test_a_model_with_less_context_is_strictly_worse(symbols):
    best, bigram, unigram = (entropy.entropy_rate(context_len=context) for context in (2, 1, 0))
    assert best + 0.3 < bigram < unigram - 0.3
    assert entropy.entropy_rate(context_len=9) == best
    empirical = plug_in_entropy(symbols[:-1] * 32 + symbols[1:], symbols[:-1])
    assert empirical > best + 0.3  # although it is fitted on the text that scores it


def test_a_negative_context_is_refused():
    with pytest.raises(ValueError, match="context_len=-1"):
        entropy.entropy_rate(context_len=-1)
