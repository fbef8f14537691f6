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

from minidist.hashing import mix, mix_int, to_signed64


class DropoutKeys(NamedTuple):
    """The hashes of a batch's tokens and features at one dropout site, from which `keep_mask` computes the mask.

    low, high: (b, s) int32, the lower and upper half of each token's hash. features: (h,) int32, each feature's hash.
    """

    low: Tensor
    high: Tensor
    features: Tensor


@dataclass(frozen=True)
class DropoutAddress:
    """Identifies a batch in the run, independently of the layout; its dropout masks are a function of this address.

    seed: the run's seed; any integer, taken modulo 2**64. step: number of the step. samples: (b,) int64, global numbers
    of the samples. positions: (s,) int64, positions of this rank's tokens in the unsplit sequence.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor

    @cached_property
    def _token_hashes(self) -> Tensor:
        """A hash of seed, step, sample and position of each token, (b, s) int64; cached for all dropout sites."""
        key = mix_int(mix_int(self.seed) + self.step)
        sample_keys = mix(self.samples + to_signed64(key))  # (b,)
        # Hashed here, outside any compiled block: `step` is a new Python integer each time and would recompile it.
        return mix(sample_keys[:, None] + self.positions[None, :])

    def site_keys(self, site: int, num_features: int) -> DropoutKeys:
        """Return the keys of one dropout site (a place in the model with dropout), for `keep_mask`.

        site: its number (`dropout_site_index`); 0 for the embedding. num_features: the size of the hidden state.
        """
        features = torch.arange(num_features, device=self._token_hashes.device)
        rows = mix(self._token_hashes ^ to_signed64(mix_int(site)))
        return DropoutKeys(_lower_half(rows), _upper_half(rows), _upper_half(mix(features)))


def dropout_site_index(layer: int, branch: int) -> int:
    """Return the number of a layer's dropout site, from 1. branch: 0 for attention, 1 for feed-forward."""
    return 1 + 2 * layer + branch


def keep_mask(keys: DropoutKeys, p: float) -> Tensor:
    """Return the dropout mask (b, s, h) bool: True, with probability `1 - p`, for each element that is kept.

    keys: the site's keys (`DropoutAddress.site_keys`). The probability is rounded to a multiple of 2**-32.
    """
    x = keys.low[..., None] ^ keys.features
    x ^= (x >> 16) & 0xFFFF  # the mask makes the shift of a signed integer a logical one
    x *= 0x7FEB352D
    x += keys.high[..., None]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    # lowbias32's final x ^= x >> 16 is left out: it does not change the upper half, which decides the comparison.
    return x >= round(p * 2**32) - 2**31


def dropout(hidden: Tensor, p: float, keys: DropoutKeys) -> Tensor:
    """Zero each element of `hidden` (b, s, h) with probability `p` and scale the rest by `1 / (1 - p)`.

    keys: the site's keys (`DropoutAddress.site_keys`), which determine the mask.
    """
    return hidden * keep_mask(keys, p) * (1 / (1 - p))


def _upper_half(x: Tensor) -> Tensor:
    """Return the upper 32 bits of int64 numbers, as int32."""
    return (x >> 32).to(torch.int32)


def _lower_half(x: Tensor) -> Tensor:
    """Return the lower 32 bits of int64 numbers, as int32."""
    return ((x << 32) >> 32).to(torch.int32)  # sign-extended first, so that the cast is never out of range
