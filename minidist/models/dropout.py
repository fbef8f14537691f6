"""Dropout with a counter-based mask: a hash of an element's global address, without generator state.

The mask of an element depends only on (seed, step, site, sample, position, feature). It is therefore the same however
the batch is split over ranks, micro-batches and stages, and however often a block is recomputed.

All features of a token share the rest of their address, so that part is hashed once per token, in 64 bits (splitmix64,
Steele, Lea and Flood 2014). Per element, a 32-bit mixer (the constants of Wellons' lowbias32) combines the low half of
the token's hash with the feature's hash, and adds the high half between its rounds. The arithmetic is integer only and
wraps identically on every device, so the mask is the same in every dtype.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.hashing import mix, mix_int, signed


class DropoutKeys(NamedTuple):
    """The hashed addresses of one dropout site, from which `keep_mask` computes the mask."""

    low: Tensor  # (b, s) int32
    high: Tensor  # (b, s) int32
    features: Tensor  # (h,) int32


@dataclass(frozen=True)
class DropoutAddress:
    """The global address of a batch: what its dropout masks are a function of, in every layout.

    seed: of the run; any integer, taken modulo 2**64.
    step: optimizer step.
    samples: (b,) int64, global sample numbers.
    positions: (s,) int64, positions in the unsplit sequence.
    features: (h,) int64, features of the unsplit hidden state, or None when this rank holds all of them.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor
    features: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        """(b, s) int64: the hash of seed, step, sample and position, which all sites share. Computed on first use."""
        key = mix_int(mix_int(self.seed) + self.step)
        sample_keys = mix(self.samples + signed(key))  # (b,)
        # Hashed here, outside any compiled block: `step` is a new Python integer each time and would recompile it.
        return mix(sample_keys[:, None] + self.positions[None, :])

    def keys(self, site: int, width: int) -> DropoutKeys:
        """Return the keys of dropout site `site`, which has `width` features.

        Raises ValueError if `features` has another length than `width`.
        """
        features = self.features
        if features is None:
            features = torch.arange(width, device=self.rows.device)
        elif len(features) != width:
            raise ValueError(f"the dropout address names {len(features)} features, the hidden state has {width}")
        rows = mix(self.rows ^ signed(mix_int(site)))
        return DropoutKeys(_low(rows), _high(rows), _high(mix(features)))


def dropout_site(layer: int, branch: int) -> int:
    """The number of a dropout site in a layer. branch: 0 attention, 1 feed-forward. Site 0 is the embedding."""
    return 1 + 2 * layer + branch


def keep_mask(keys: DropoutKeys, p: float) -> Tensor:
    """Return the mask (b, s, h) bool: True, with probability `1 - p` to the nearest 2**-32, where dropout keeps."""
    x = keys.low[..., None] ^ keys.features
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift of a signed integer a logical one
    x *= 0x7FEB352D
    x += keys.high[..., None]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    # lowbias32's final x ^= x >> 16 is left out: it does not change the upper half, which decides the comparison.
    return x >= round(p * 2**32) - 2**31


def dropout(hidden: Tensor, p: float, keys: DropoutKeys) -> Tensor:
    """Zero each element of (b, s, h) with probability `p` and scale the rest by `1 / (1 - p)`."""
    return hidden * keep_mask(keys, p) * (1 / (1 - p))


def _high(x: Tensor) -> Tensor:
    return (x >> 32).to(torch.int32)


def _low(x: Tensor) -> Tensor:
    return ((x << 32) >> 32).to(torch.int32)  # sign-extended first, so that the cast is never out of range
