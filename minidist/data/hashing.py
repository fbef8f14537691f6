"""64-bit hashes of addresses: the only source of chance in this room.

numpy promises no equal stream of its Generators across versions; whole-number arithmetic modulo 2**64 is the same on
every machine and in every version, so everything "random" here is a hash of its address (seed, epoch, index, ...).
"""

import numpy as np

# Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), the variant known as splitmix64.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, a bijection of the 64-bit numbers."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def hash64(*fields: int | np.ndarray) -> np.ndarray:
    """Hash the address `fields` (integers or integer arrays, broadcast together) to uint64.

    One-to-one in the last field while the others are fixed: hashes of arange(n) never tie.
    """
    h = np.uint64(0)
    with np.errstate(over="ignore"):  # wrapping is the arithmetic we want; numpy warns about it for scalars only
        for field in fields:
            value = np.uint64(field % 2**64) if isinstance(field, int) else np.asarray(field).astype(np.uint64)
            h = _mix(h + (value + np.uint64(1)) * _STEP)
    return np.asarray(h)
