"""Data loader whose samples are a pure function of (seed, position), the same in every layout.

The position is the number of samples consumed since the start of the run, and the only data state in a checkpoint: the
samples at positions p..p+n-1 do not depend on the number of ranks, on micro-batches, or on earlier batch sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minidist.data.partition import block_partition, permutation, weighted_partition
from minidist.hashing import hash64
from minidist.labels import IGNORE_INDEX

_LENGTHS = -1  # hashed in place of the epoch for the lengths; no epoch is negative


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of b samples of s tokens; b may be 0.

    tokens, labels: (b, s) int64; labels[i, t] is the token after tokens[i, t], or IGNORE_INDEX if it is not in the
    loss. samples: (b,) int64, the samples' positions in the run, which dropout masks depend on.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor

    @property
    def num_loss_tokens(self) -> int:
        """Number of labels in the loss (all but IGNORE_INDEX). On a GPU it synchronises: call it on the CPU."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Return a copy of the batch on `device`."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.samples.to(device))


class Loader:
    """Cuts a text into samples of `seq_len` tokens and their labels, shuffled anew by `seed` in every epoch.

    tokens: (n,) any integer dtype, may be memory-mapped. Window w holds tokens w * seq_len .. (w + 1) * seq_len. Its
    last token is also the first of the next window, so every token but the first is a label once per epoch, except for
    a remainder shorter than seq_len.
    seed: None keeps the windows in the order of the text. windows: (num_samples,), indices of the windows to use; None:
    all.
    min_length: if given, sample k keeps only its first min_length..seq_len labels, a length hashed from (seed, k). This
    simulates uneven padding, under which the mean of per-rank means differs from the mean over all tokens.

    Raises ValueError if there is no window, or min_length is outside 0..seq_len.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        seed: int | None,
        *,
        windows: np.ndarray | None = None,
        min_length: int | None = None,
    ) -> None:
        if seq_len < 1 or tokens.size < seq_len + 1:
            raise ValueError(f"{tokens.size} tokens hold no window of seq_len={seq_len} tokens and the label after it")
        if min_length is not None and not 0 <= min_length <= seq_len:
            raise ValueError(f"min_length={min_length} must be in 0..seq_len={seq_len}")
        self.seq_len = seq_len
        self.seed = seed
        self.min_length = min_length
        self._text = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]  # a view: copies nothing
        self._windows = np.arange(len(self._text)) if windows is None else np.asarray(windows, dtype=np.int64)
        if not len(self._windows):
            raise ValueError("windows is empty: an epoch needs at least one sample")
        self._memo: tuple[int, np.ndarray] | None = None  # cache: the last epoch used, and its order

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return len(self._windows)

    def window_indices(self, position: int, n: int) -> np.ndarray:
        """Return the indices, (n,) int64, of the windows that are samples position..position+n-1 of the run.

        Positions count samples from 0 through all epochs of the run: `num_samples` is the first of the second epoch.
        """
        if position < 0 or n < 0:
            raise ValueError(f"position={position} and n={n} must be at least 0")
        parts = [np.empty(0, np.int64)]
        while n > 0:
            epoch, offset = divmod(position, self.num_samples)
            parts.append(self._epoch_windows(epoch)[offset : offset + n])
            position += parts[-1].size
            n -= parts[-1].size
        return np.concatenate(parts)

    def global_batch(self, position: int, size: int) -> Batch:
        """Return the global batch of samples position..position+size-1, counted through all epochs of the run."""
        text = self._text[self.window_indices(position, size)].astype(np.int64)  # (b, s + 1)
        samples = np.arange(position, position + size)
        tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
        if self.min_length is not None:
            labels[np.arange(self.seq_len) >= self._label_counts(samples)[:, None]] = IGNORE_INDEX
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(samples))

    def micro_batches(
        self,
        position: int,
        size: int,
        dp_rank: int,
        dp_size: int,
        micro_batches: int,
        shares: Sequence[float] | None = None,
    ) -> list[Batch]:
        """Return the part of `global_batch(position, size)` of rank `dp_rank`, as exactly `micro_batches` batches.

        The global batch is split over dp_size data-parallel ranks into consecutive parts, whose sizes differ by at most
        one sample if `shares` is None and are otherwise proportional to `shares`, one number per rank; each part is
        split evenly into `micro_batches` micro-batches. A micro-batch may have 0 samples, with tokens (0, s). Raises
        ValueError for an invalid rank, invalid shares or micro_batches < 1.
        """
        if shares is not None and len(shares) != dp_size:
            raise ValueError(f"{len(shares)} shares for dp={dp_size} ranks: give one share per rank")
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches} must be at least 1")
        mine = block_partition(size, dp_size, dp_rank) if shares is None else weighted_partition(size, shares, dp_rank)
        batches = []
        for index in range(micro_batches):
            part = mine[block_partition(mine.size, micro_batches, index)]
            first = int(part[0]) if part.size else 0
            batches.append(self.global_batch(position + first, part.size))
        return batches

    def _epoch_windows(self, epoch: int) -> np.ndarray:
        """Return the indices of the windows in the order of an epoch, (num_samples,) int64."""
        if self.seed is None:
            return self._windows
        if self._memo is None or self._memo[0] != epoch:
            self._memo = epoch, self._windows[permutation(self.num_samples, self.seed, epoch)]
        return self._memo[1]

    def _label_counts(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of labels that each sample keeps, (b,) int64 in min_length..seq_len."""
        choices = np.uint64(self.seq_len - self.min_length + 1)
        return self.min_length + (hash64(self.seed or 0, _LENGTHS, samples) % choices).astype(np.int64)


def evaluation_loader(tokens: np.ndarray, seq_len: int, num_samples: int) -> Loader:
    """Return a loader of a fixed set of `num_samples` windows (all, if fewer), spread evenly over `tokens`.

    An evaluation reads one epoch: `micro_batches(0, loader.num_samples, ...)` on each rank.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    available = Loader(tokens, seq_len, None).num_samples
    chosen = min(num_samples, available)
    return Loader(tokens, seq_len, None, windows=np.arange(chosen) * available // chosen)
