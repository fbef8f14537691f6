"""The all-reduce of int8 numbers, against the same arithmetic in numpy, on real ranks."""

import numpy as np
import pytest
import torch

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.quantized import all_reduce_int8
from minidist.comm.wire_bytes import int8_chunk_bytes
from minidist.mesh import Mesh


def draw(seed: int, rank: int, numel: int) -> torch.Tensor:
    """Values of very different sizes, so that blocks have very different scales."""
    random = np.random.default_rng([seed, rank])
    return torch.from_numpy(
        random.normal(size=numel) * 10.0 ** random.integers(-6, 6, size=numel // 300 + 1).repeat(300)[:numel]
    )


def reduce_on_rank(world: World, numel: int, dtype: torch.dtype, poisoned: bool):
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]
    value = draw(numel, world.rank, numel).to(dtype)
    if poisoned and world.rank == 1:
        value[300] = float("nan")
    all_reduce_int8(value, group)
    return value, group.meter.wire_bytes["data"]


def rounded(values: np.ndarray) -> np.ndarray:
    """Each block of 256 values, rounded to the nearest multiple of 1/127 of its largest magnitude."""
    blocks = values.reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True).astype(values.dtype) / values.dtype.type(127)
    scale = scale.astype(np.float32)
    return (np.round(blocks / np.where(scale > 0, scale, 1)) * scale.astype(values.dtype)).reshape(-1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 256, 1023, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_that_of_rounded_values_and_equal_on_all_ranks(ranks, size, numel, dtype):
    found = ranks(reduce_on_rank, size, numel, dtype, False)
    padded = -(-numel // (size * 256)) * size * 256
    inputs = np.zeros((size, padded), dtype=np.float32 if dtype == torch.float32 else np.float64)
    inputs[:, :numel] = [draw(numel, rank, numel).to(dtype).numpy() for rank in range(size)]
    expected = rounded(np.sum([rounded(each) for each in inputs], axis=0))[:numel]
    largest = np.abs(inputs.reshape(size, -1, 256)).max(2).sum(0).repeat(256)[:numel]
    for value, sent in found:
        assert torch.equal(value, found[0][0]), "all ranks have the same sum"
        # A sum that is halfway between two multiples may be rounded either way: a scale, at most 1/127 of the largest.
        assert np.all(np.abs(value.numpy() - expected) <= largest / 127)
        assert np.mean(np.abs(value.numpy() - expected) <= 1e-6 * largest) > 0.99
        # Within the bound of the docstring, of the exact sum.
        exact = inputs[:, :numel].astype(np.float64).sum(0)
        assert np.all(np.abs(value.numpy() - exact) <= 1.01 * 2 * largest / 254)
        assert sent == 2 * (size - 1) * int8_chunk_bytes(numel, size)


def test_a_value_that_is_not_finite_makes_its_block_nan_everywhere(ranks):
    for value, _ in ranks(reduce_on_rank, 2, 1000, torch.float32, True):
        assert value[256:512].isnan().all() and value[:256].isfinite().all() and value[512:].isfinite().all()
