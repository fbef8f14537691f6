"""Stochastic rounding to bfloat16: to a neighbouring value, unbiased, and equal in every layout."""

import hashlib
import itertools
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.parameters import Box, flat_boxes
from minidist.precision.rounding import global_flat_indices, round_stochastically


def round_values(values, seed=1, step=2, name="layer.weight", index=0) -> torch.Tensor:
    values = torch.as_tensor(values, dtype=torch.float32)
    into = torch.full(values.shape, 7.0, dtype=torch.bfloat16)
    round_stochastically(values, into, seed, step, name, index)
    return into


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def float_from_bits(number: int) -> float:
    return struct.unpack("<f", struct.pack("<I", number))[0]


def reference_bits(value: float, seed: int, step: int, name: str, index: int) -> int:
    """The 16 bits of a rounded finite value, computed with Python integers."""
    m64 = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & m64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    of_name = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    word = mix(index // 4 + mix(mix(mix(seed) + step) ^ of_name))
    noise = (word >> (16 * (index % 4))) & 0xFFFF
    (number,) = struct.unpack("<I", struct.pack("<f", value))
    return (number + noise) >> 16


@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=9),
    seed=st.integers(0, 2**63),
    step=st.integers(0, 2**40),
    start=st.integers(0, 2**41),
)
def test_rounding_matches_a_reference_in_python_integers(values, seed, step, start):
    found = [number & 0xFFFF for number in bits(round_values(values, seed, step, "w", start)).tolist()]
    assert found == [reference_bits(value, seed, step, "w", start + i) for i, value in enumerate(values)]


def test_rounding_is_pinned_to_the_first_release():
    """A run resumed by a later version must go on with the same rounding."""
    values = torch.arange(-500, 500) / 300
    digest = hashlib.sha256(bits(round_values(values, 1, 2, "layer.weight", 5)).numpy().tobytes()).hexdigest()
    assert digest[:16] == "41d96ee99383b512"


# Subnormals, the largest, both signs; `offset` is the part below bfloat16, which makes the probability of going up.
@pytest.mark.parametrize("upper", [0x3F80, 0xBF80, 0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0xC2F7, 0x7F7E, 0xFF7E])
@pytest.mark.parametrize("offset", [0x0001, 0x2000, 0x8000, 0xE000, 0xFFFF])
def test_rounding_probability_is_proportional_to_distance(upper, offset):
    n, p = 1 << 16, offset / 0x10000
    found = bits(round_values(torch.full((n,), float_from_bits((upper << 16) + offset)), step=upper)).int() & 0xFFFF
    assert set(found.unique().tolist()) <= {upper, upper + 1}
    went_up = (found == upper + 1).double().mean().item()
    # Binomial: 5 standard deviations of the mean of n; one draw in two million is farther away.
    assert abs(went_up - p) <= 5 * math.sqrt(p * (1 - p) / n)


def test_rounding_is_unbiased():
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)).abs() + 1e-3
    error = (round_values(values).double() - values.double()) / values.double()
    # An error is at most a step, 2**-7 of the value; its standard deviation at most half of one; the mean of n of them
    # varies by that / sqrt(n).
    assert error.abs().max() < 2**-7 and error.mean().abs() <= 5 * 2**-8 / math.sqrt(len(values))


def test_small_updates_count_on_average():
    """A thousand times 1/1000 onto 1.0: rounded to nearest, nothing; at random, about 1."""
    n, steps, update = 4096, 1000, 1e-3
    weights = torch.ones(n, dtype=torch.bfloat16)
    nearest = weights.clone()
    for step in range(steps):
        rounded_at = weights.float() + update
        round_stochastically(rounded_at, weights, 0, step, "w", 0)
        nearest += update
    assert (nearest == 1).all()
    # Each step's error is below 2**-7 (values below 2) with variance at most update * 2**-7, and all are independent.
    assert abs(weights.double().mean().item() - 2) <= 5 * math.sqrt(steps * update * 2**-7 / n)


def test_representable_values_are_unchanged():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    same, number = round_values(every.float()), ~every.isnan()
    assert torch.equal(bits(same)[number], bits(every)[number])
    assert same[~number].isnan().all()


@pytest.mark.parametrize("number", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF])
def test_nan_stays_nan(number):
    values = torch.full((64,), number - (number >> 31 << 32), dtype=torch.int32).view(torch.float32)
    assert values.isnan().all() and round_values(values).isnan().all()


def test_a_finite_value_stays_finite():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]).repeat(500)
    assert round_values(values).float().tolist() == [largest, -largest] * 500
    assert round_values([math.inf, -math.inf]).tolist() == [math.inf, -math.inf]


# -- addresses --------------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 40), cuts=st.lists(st.integers(0, 40), max_size=4), start=st.integers(0, 9))
def test_rounding_does_not_depend_on_sharding(n, cuts, start):
    values = torch.linspace(-1, 1, start + n)[start:].contiguous()
    whole = bits(round_values(values, index=start))
    for a, b in itertools.pairwise([0, *sorted(min(cut, n) for cut in cuts), n]):
        assert torch.equal(bits(round_values(values[a:b], index=start + a)), whole[a:b])
        assert torch.equal(bits(round_values(values[a:b], index=torch.arange(start + a, start + b))), whole[a:b])


def test_rounding_does_not_depend_on_the_chunk_size():
    values = torch.linspace(-1, 1, (1 << 17) + 11)
    whole, cut = bits(round_values(values)), (1 << 16) + 3
    assert torch.equal(bits(round_values(values[cut:], index=cut)), whole[cut:])
    assert torch.equal(bits(round_values(values, index=torch.arange(len(values)))), whole)


@pytest.mark.parametrize("box", [Box((0, 2), (6, 5)), Box((2, 0), (4, 7)), Box((0, 0), (6, 7)), Box((1, 1), (1, 3))])
def test_a_box_is_rounded_as_in_the_full_matrix(box):
    values = torch.linspace(-1, 1, 42).view(6, 7)
    whole = round_values(values.flatten()).view(6, 7)
    part = values[box.slices].flatten()
    assert torch.equal(round_values(part, index=global_flat_indices((6, 7), [box])), whole[box.slices].flatten())


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_global_flat_indices_of_a_flat_range(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = global_flat_indices(shape, flat_boxes(tuple(shape), start, stop))
    assert found.tolist() == list(range(start, stop)) and found.dtype == torch.int64


def test_rounding_depends_on_seed_step_name_and_index():
    values = torch.full((1 << 14,), 1 + 2**-8)  # in the middle: up or down as a coin falls
    first = bits(round_values(values))
    assert torch.equal(first, bits(round_values(values)))
    for other in ({"seed": 2}, {"step": 3}, {"name": "layer.bias"}, {"index": 1 << 20}, {"seed": 2, "step": 1}):
        agree = (bits(round_values(values, **other)) == first).double().mean().item()
        assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(len(values)), other
    for lag in (1, 2, 3, 4, 8):
        agree = (first[lag:] == first[:-lag]).double().mean().item()
        assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(len(values) - lag), lag


@pytest.mark.parametrize(
    ("values", "into"),
    [
        (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(2), torch.ones(2, dtype=torch.float16)),
        (torch.ones(2), torch.ones(3, dtype=torch.bfloat16)),
        (torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bfloat16)),
    ],
)
def test_other_dtypes_and_shapes_are_refused(values, into):
    with pytest.raises(ValueError, match=r"head: rounding goes from \(n,\) float32 to \(n,\) bfloat16, not from"):
        round_stochastically(values, into, 0, 0, "head", 0)
