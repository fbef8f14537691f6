"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the mean over many roundings is the value.

bfloat16 has 8 significant bits, so an update below 1/512 of its weight is lost when every result is rounded to the
nearest. Rounded at random, up as often as the value is near the upper neighbour, it counts on average, and training
needs no masters (Gupta et al. 2015, arXiv 1502.02551, section 3). A bfloat16 is the upper half of a float32: adding 16
random bits to the lower half, and cutting it off, carries into the upper half just that often.

The random bits are addressed, not streamed: a function of (seed, step, parameter, index in the unsplit parameter), so
that an element has the same fate wherever it lies.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.hashing import mix, mix_int, signed
from minidist.parameters import Box

_CHUNK = 1 << 16  # elements at a time: temporary memory stays below 2 MiB
_LANES = 4  # elements that share one 64-bit hash, 16 bits each
_LARGEST = 0x7F7F0000  # the bits of the largest finite bfloat16; above are infinity and NaN
_INFINITY = 0x7F800000


@torch.no_grad()
def round_stochastically(values: Tensor, into: Tensor, seed: int, step: int, name: str, index: int | Tensor) -> None:
    """Write `values`, rounded, to `into`.

    What bfloat16 holds exactly stays as it is, and so do infinities and NaN. A finite value stays finite: beyond the
    largest bfloat16 it becomes that one.

    values: (n,) float32, contiguous. into: (n,) bfloat16. seed: of the run; step: of the optimizer; name: global name.
    index: where the elements are in the flattened unsplit parameter: of the first, when the others follow it, or an
    (n,) int64 tensor (`global_flat_indices`). Raises ValueError for other dtypes or sizes.
    """
    if (values.dtype, into.dtype) != (torch.float32, torch.bfloat16) or values.shape != into.shape or values.dim() != 1:
        raise ValueError(
            f"{name}: rounding goes from (n,) float32 to (n,) bfloat16, "
            f"not from {tuple(values.shape)} {values.dtype} to {tuple(into.shape)} {into.dtype}"
        )
    key = signed(mix_int(mix_int(mix_int(seed) + step) ^ _number_of(name)))
    source, target = values.view(torch.int32), into.view(torch.int16)
    for start in range(0, len(values), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(values)))
        if isinstance(index, Tensor):
            noise = _noise_at(key, index[part])
        else:
            noise = _noise(key, index + part.start, index + part.stop, values.device)
        target[part] = _upper_halves(source[part], noise)


def _upper_halves(bits: Tensor, noise: Tensor) -> Tensor:
    """The bits of bfloat16 (int16) that float32 of these bits (int32) round to, with 16 random bits (int32) for each.

    The sign is in the highest bit and apart: adding to the bits makes a magnitude larger, whatever the sign.
    """
    magnitude = bits & 0x7FFFFFFF
    upper = (bits + noise.masked_fill(magnitude >= _LARGEST, 0)) >> 16
    # What makes a NaN may be in the lower half only; without it infinity would be left.
    return (upper | ((magnitude > _INFINITY).int() << 6)).to(torch.int16)


def _noise(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """(stop - start,) int32: 16 random bits for each index."""
    first, last = start // _LANES, -(-stop // _LANES)
    lanes = mix(torch.arange(first, last, device=device) + key).view(torch.int16)
    return lanes[start - first * _LANES : stop - first * _LANES].int() & 0xFFFF


def _noise_at(key: int, index: Tensor) -> Tensor:
    """The same for any indexes. The lowest bits are the first lane's, as in memory."""
    return ((mix(index // _LANES + key) >> (16 * (index % _LANES))) & 0xFFFF).int()


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def global_flat_indices(shape: Sequence[int], boxes: Sequence[Box], device: torch.device | None = None) -> Tensor:
    """(n,) int64: where the elements of these boxes, in memory order, are in a flattened tensor of this shape."""
    found = []
    for box in boxes:
        index = torch.zeros((), dtype=torch.int64, device=device)
        for size, start, stop in zip(shape, box.start, box.stop, strict=True):
            index = index[..., None] * size + torch.arange(start, stop, device=device)
        found.append(index.flatten())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=device)
