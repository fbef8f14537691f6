"""The all-reduce of int8 numbers, against the same arithmetic in numpy, on real ranks."""

import numpy as np
import pytest
import torch

from minidist.comm import GroupSpec, Meter, World, bind
from minidist.comm.quantized import all_reduce_int8
from minidist.comm.wire_bytes import int8_chunk_bytes
from minidist.mesh import Mesh
from tests.helpers.int8_reference import BLOCK, padded, reduce_with_feedback, rounded


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
    all_reduce_int8(value, torch.zeros_like(value), group)
    return value, group.meter.wire_bytes["data"]


CALLS, NUMEL = 12, 1300


def reduce_repeatedly(world: World) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Sum one tensor of each rank CALLS times; returns the sums and the last error."""
    group = bind(world, Mesh(dp=world.size), [GroupSpec("data", ("dp",))], meter=Meter())["data"]
    error, sums = torch.zeros(NUMEL, dtype=torch.float64), []
    for call in range(CALLS):
        sums.append(draw(call, world.rank, NUMEL))
        all_reduce_int8(sums[-1], error, group)
    return sums, error


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 256, 1023, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_that_of_rounded_values_and_equal_on_all_ranks(ranks, size, numel, dtype):
    found = ranks(reduce_on_rank, size, numel, dtype, False)
    inputs = padded(np.array([draw(numel, rank, numel).to(dtype).numpy() for rank in range(size)]))
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


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_rounded_off_is_sent_by_the_next_call(ranks, size):
    """The sums and errors are those of one process; all sums add up to the exact total less the last errors."""
    found = ranks(reduce_repeatedly, size)
    errors = np.zeros((size, NUMEL))
    exact, applied, without_feedback, largest = np.zeros((4, NUMEL))
    for call, sums in enumerate(zip(*(sums for sums, _ in found), strict=True)):
        values = np.array([draw(call, rank, NUMEL).numpy() for rank in range(size)])
        expected, errors = reduce_with_feedback(values, errors)
        assert all(torch.equal(each, sums[0]) for each in sums), "all ranks have the same sum"
        np.testing.assert_allclose(sums[0], expected, rtol=1e-12, atol=1e-12)
        exact += values.sum(0)
        applied += sums[0].numpy()
        without_feedback += reduce_with_feedback(values, np.zeros_like(values))[0]
        of_blocks = np.abs(padded(values)).reshape(size, -1, BLOCK).max(2).sum(0).repeat(BLOCK)[:NUMEL]
        largest = np.maximum(largest, of_blocks)
        assert np.all(np.abs(applied - exact) <= 1.1 * 2 * largest / 254), "the error of all calls is that of one"
    np.testing.assert_allclose([error for _, error in found], errors, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(applied + sum(error for _, error in found).numpy(), exact, rtol=1e-9, atol=1e-9)
    assert np.abs(without_feedback - exact).sum() > 2 * np.abs(applied - exact).sum()


def test_a_value_that_is_not_finite_makes_its_block_nan_everywhere(ranks):
    for value, _ in ranks(reduce_on_rank, 2, 1000, torch.float32, True):
        assert value[256:512].isnan().all() and value[:256].isfinite().all() and value[512:].isfinite().all()
