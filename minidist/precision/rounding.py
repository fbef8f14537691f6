"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the expected result is the value.

bfloat16 has 8 significant bits, so rounding to nearest loses every update below 1/512 of its weight. If the probability
of rounding up is the value's distance from its lower neighbour, updates survive in expectation, and training needs no
master weights (Gupta et al. 2015, arXiv 1502.02551, section 3). A bfloat16 is the upper half of a float32: add 16
random bits to the lower half and truncate, and the carry into the upper half has that probability.

The random bits are a hash of (seed, step, parameter, index in the unsplit parameter), so an element is rounded the same
way in every layout.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.hashing import mix, mix_int, to_signed64
from minidist.parameters import Box

_CHUNK = 1 << 16  # elements rounded at a time, so that temporary memory stays below 2 MiB
_LANES = 4  # elements that share one 64-bit hash, 16 bits each
_LARGEST = 0x7F7F0000  # the bits of the largest finite bfloat16; above are infinity and NaN
_INFINITY = 0x7F800000


@torch.no_grad()
def round_stochastically(values: Tensor, into: Tensor, seed: int, step: int, name: str, index: int | Tensor) -> None:
    """Round `values` (n,) float32 stochastically into `into` (n,) bfloat16.

    Values that bfloat16 represents exactly, infinities and NaN are unchanged; other finite values stay finite.

    values: contiguous elements of one parameter. The random bits depend on `seed` (of the run), `step` (number of the
    optimizer step), `name` (of the parameter in the full model) and each element's index. index: the position of the
    elements in the flattened full parameter: the first position, if they are consecutive, or an (n,) int64 tensor of
    all positions (`global_flat_indices`). Raises ValueError for other dtypes or sizes.
    """
    if (values.dtype, into.dtype) != (torch.float32, torch.bfloat16) or values.shape != into.shape or values.dim() != 1:
        raise ValueError(
            f"{name}: rounding goes from (n,) float32 to (n,) bfloat16, "
            f"not from {tuple(values.shape)} {values.dtype} to {tuple(into.shape)} {into.dtype}"
        )
    key = to_signed64(mix_int(mix_int(mix_int(seed) + step) ^ _hash_name(name)))
    source, target = values.view(torch.int32), into.view(torch.int16)
    for start in range(0, len(values), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(values)))
        if isinstance(index, Tensor):
            noise = _random_bits_at(key, index[part])
        else:
            noise = _random_bits(key, index + part.start, index + part.stop, values.device)
        target[part] = _upper_halves(source[part], noise)


def _upper_halves(bits: Tensor, noise: Tensor) -> Tensor:
    """Return bfloat16 bits (int16) of float32 `bits` (int32), rounded with 16 random bits `noise` (int32) per element.

    Adding to the bits increases the magnitude for either sign, as the sign is a separate bit.
    """
    magnitude = bits & 0x7FFFFFFF
    upper = (bits + noise.masked_fill(magnitude >= _LARGEST, 0)) >> 16
    # A NaN whose payload is only in the lower half would become an infinity: set a bit of the upper half.
    return (upper | ((magnitude > _INFINITY).int() << 6)).to(torch.int16)


def _random_bits(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each index from `start` to `stop`, (stop - start,) int32."""
    first, last = start // _LANES, -(-stop // _LANES)
    lanes = mix(torch.arange(first, last, device=device) + key).view(torch.int16)
    return lanes[start - first * _LANES : stop - first * _LANES].int() & 0xFFFF


def _random_bits_at(key: int, index: Tensor) -> Tensor:
    """Return the bits of `_random_bits` at arbitrary indices (n,). The lowest 16 bits of a hash are its first lane."""
    return ((mix(index // _LANES + key) >> (16 * (index % _LANES))) & 0xFFFF).int()


def _hash_name(name: str) -> int:
    """Return a 64-bit hash of a parameter's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def global_flat_indices(shape: Sequence[int], boxes: Sequence[Box], device: torch.device | None = None) -> Tensor:
    """Return the flat indices, (n,) int64, that the elements of `boxes` have in a contiguous tensor of `shape`.

    boxes: index ranges in each dimension, one box after the other; the elements of a box are in row-major order.
    """
    found = []
    for box in boxes:
        index = torch.zeros((), dtype=torch.int64, device=device)
        for size, start, stop in zip(shape, box.start, box.stop, strict=True):
            index = index[..., None] * size + torch.arange(start, stop, device=device)
        found.append(index.flatten())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=device)
