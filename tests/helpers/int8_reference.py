"""The all-reduce of int8 numbers with error feedback, in numpy and one process."""

import numpy as np

BLOCK = 256


def rounded(values: np.ndarray) -> np.ndarray:
    """Each block of 256 values, rounded to the nearest multiple of 1/127 of its largest magnitude."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True).astype(values.dtype) / values.dtype.type(127)
    scale = scale.astype(np.float32)
    return (np.round(blocks / np.where(scale > 0, scale, 1)) * scale.astype(values.dtype)).reshape(-1)


def padded(values: np.ndarray) -> np.ndarray:
    """Values (ranks, n) followed by zeros, so that every rank has a chunk of equally many whole blocks."""
    ranks, numel = values.shape
    return np.pad(values, [(0, 0), (0, -numel % (ranks * BLOCK))])


def reduce_with_feedback(values: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum values (ranks, n) as int8; return the sum (n,) and the new errors (ranks, n). errors: of the call before."""
    ranks, numel = values.shape
    exact = padded(values + errors)
    sent = np.array([rounded(of_rank) for of_rank in exact])
    total = sent.sum(0)
    result, left_out = rounded(total), exact - sent
    for rank, chunk in enumerate(np.split(np.arange(len(total)), ranks)):
        left_out[rank, chunk] += (total - result)[chunk]
    return result[:numel], left_out[:, :numel]
