"""64-bit hashes in place of random generators: a pseudorandom number is a hash of (seed, epoch, index, ...).

NumPy does not guarantee the streams of its Generators across versions; integer arithmetic modulo 2**64 is the same on
every machine.
"""

import numpy as np

# Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), the variant known as splitmix64.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 finaliser, a bijection on 64-bit integers."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def hash64(*fields: int | np.ndarray) -> np.ndarray:
    """Hash a tuple of integers, or of integer arrays that are broadcast together, to uint64.

    Injective in the last field for fixed other fields, so hashes of arange(n) are distinct.
    """
    h = np.uint64(0)
    with np.errstate(over="ignore"):  # overflow wraps, as wanted; NumPy warns about it for scalars
        for field in fields:
            value = np.uint64(field % 2**64) if isinstance(field, int) else np.asarray(field).astype(np.uint64)
            h = _mix(h + (value + np.uint64(1)) * _STEP)
    return np.asarray(h)
