"""Dropout whose mask is a function of where an element is, not of how many random numbers were drawn before it.

The mask of an element depends on (seed, step, site, sample, position, feature) and on nothing else. However a batch is
cut over ranks, micro-batches and stages, and however often a block is recomputed, the element keeps its fate.

Most of the address is the same for a whole row of features, so it is hashed once per row, in 64 bits (splitmix64,
Steele, Lea and Flood 2014). Only the last step is done per element, in 32 bits: the row's low half meets the feature's
hash, and the rounds of a 32-bit mixer (the constants of Wellons' lowbias32) follow, with the row's high half added
between them. Integer arithmetic wraps alike on every device, and no floating-point number takes part, so the mask is
the same in every dtype.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.hashing import mix, mix_int, signed


class DropoutKeys(NamedTuple):
    """The hashed address of one site: what a block needs to draw its mask, as tensors only."""

    low: Tensor  # (b, s) int32
    high: Tensor  # (b, s) int32
    features: Tensor  # (h,) int32


@dataclass(frozen=True)
class DropoutAddress:
    """Where a batch is in the whole run; all numbers are those of one process that holds everything.

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
        """(b, s) int64: the part of the hash that all sites share. A model without dropout never asks for it."""
        key = mix_int(mix_int(self.seed) + self.step)
        sample_keys = mix(self.samples + signed(key))  # (b,)
        # Hashed here, outside any compiled block: `step` is a new Python integer each time and would recompile it.
        return mix(sample_keys[:, None] + self.positions[None, :])

    def keys(self, site: int, width: int) -> DropoutKeys:
        """The keys of one place in the model where dropout is applied to `width` features.

        Raises ValueError when this address names another number of features.
        """
        features = self.features
        if features is None:
            features = torch.arange(width, device=self.rows.device)
        elif len(features) != width:
            raise ValueError(f"the dropout address names {len(features)} features, the hidden state has {width}")
        rows = mix(self.rows ^ signed(mix_int(site)))
        return DropoutKeys(_low(rows), _high(rows), _high(mix(features)))


def dropout_site(layer: int, branch: int) -> int:
    """Number of a dropout site: the embedding has 0, a layer's attention and feed-forward branch (0, 1) come after."""
    return 1 + 2 * layer + branch


def keep_mask(keys: DropoutKeys, p: float) -> Tensor:
    """(b, s, h) bool: which elements survive. Each survives with probability `1 - p`, to the nearest 2**-32."""
    x = keys.low[..., None] ^ keys.features
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift of a signed integer a logical one
    x *= 0x7FEB352D
    x += keys.high[..., None]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    # lowbias32 ends in x ^= x >> 16; the upper half, which decides against a threshold, stays as it is.
    return x >= round(p * 2**32) - 2**31


def dropout(hidden: Tensor, p: float, keys: DropoutKeys) -> Tensor:
    """Zero each element of (b, s, h) with probability `p` and scale the rest by `1 / (1 - p)`."""
    return hidden * keep_mask(keys, p) * (1 / (1 - p))


def _high(x: Tensor) -> Tensor:
    return (x >> 32).to(torch.int32)


def _low(x: Tensor) -> Tensor:
    return ((x << 32) >> 32).to(torch.int32)  # sign-extended first, so that the cast never meets a number out of range
