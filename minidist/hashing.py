"""A 64-bit hash, of tensors and of integers alike: random numbers that are a function of their address.

Both are the finalizer of splitmix64 (Steele, Lea and Flood 2014, the variant known by that name), one-to-one on 64
bits. Whole-number arithmetic wraps alike on every device, so an address has the same bits wherever it is hashed.
"""

from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """Hash every element of an int64 tensor."""
    x = x + signed(_GOLDEN)
    for shift, factor in _MIX64:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mix_int(x: int) -> int:
    """The same of one integer, taken modulo 2**64."""
    x = (x + _GOLDEN) & _MASK64
    for shift, factor in _MIX64:
        x = ((x ^ (x >> shift)) * factor) & _MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The int64 with these 64 bits."""
    return x - (1 << 64) if x >> 63 else x
