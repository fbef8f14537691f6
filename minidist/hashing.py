"""64-bit hashes in place of random generators: a random number is a function of its address, as (seed, epoch, index).

The hash is the finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection on 64 bits. Integer arithmetic wraps
identically on every device and in every version of NumPy and torch, whose own generators may change. No torch here.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(x: "Tensor | np.ndarray") -> "Tensor | np.ndarray":
    """Return the splitmix64 hash of every element of an int64 tensor or array, as int64 of the same shape."""
    x = x + to_signed64(_GOLDEN)
    for shift, factor in _MIX64:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * to_signed64(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mix_int(x: int) -> int:
    """Return the splitmix64 hash of one integer (modulo 2**64), as an unsigned integer with the bits of `mix`."""
    x = (x + _GOLDEN) & _MASK64
    for shift, factor in _MIX64:
        x = ((x ^ (x >> shift)) * factor) & _MASK64
    return x ^ (x >> 31)


def hash64(*fields: int | np.ndarray) -> np.ndarray:
    """Return a uint64 hash of a tuple of integers; with arrays, which are broadcast together, one hash per element.

    Tuples that differ only in the last field have different hashes, so the hashes of arange(n) are distinct.
    """
    h = np.int64(0)
    with np.errstate(over="ignore"):  # overflow wraps, as wanted; NumPy warns about it for scalars
        for field in fields:
            value = (
                np.int64(to_signed64(field % 2**64)) if isinstance(field, int) else np.asarray(field).astype(np.int64)
            )
            h = mix(h + value * np.int64(to_signed64(_GOLDEN)))
    return np.asarray(h).view(np.uint64)


def to_signed64(x: int) -> int:
    """Convert an unsigned 64-bit integer to the signed one with the same bits."""
    return x - (1 << 64) if x >> 63 else x
