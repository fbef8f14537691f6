"""A 64-bit hash of tensors and integers, for random numbers that are a function of their address.

`mix` and `mix_int` are the finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection on 64 bits. Integer
arithmetic wraps identically on every device, so the hash is the same everywhere.
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
    """Hash one integer, taken modulo 2**64, as `mix` does."""
    x = (x + _GOLDEN) & _MASK64
    for shift, factor in _MIX64:
        x = ((x ^ (x >> shift)) * factor) & _MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """Reinterpret an unsigned 64-bit integer as a signed one."""
    return x - (1 << 64) if x >> 63 else x
