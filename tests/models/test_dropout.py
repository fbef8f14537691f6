"""A dropout mask is a function of its address alone, and passes statistical tests."""

import dataclasses
import hashlib
import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress, dropout, dropout_site_index, keep_mask
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, dropout=0.25)


def address(seed=0, step=0, samples=6, positions=10) -> DropoutAddress:
    return DropoutAddress(seed, step, torch.arange(samples), torch.arange(positions))


def mask(where: DropoutAddress, site: int = 0, width: int = 32, p: float = 0.25) -> torch.Tensor:
    return keep_mask(where.site_keys(site, width), p)


def reference(seed: int, step: int, site: int, sample: int, position: int, feature: int, p: float) -> bool:
    """The decision for one element in plain Python integers."""
    m64, m32 = 2**64 - 1, 2**32 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & m64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    row = mix(mix(sample + mix(mix(seed) + step)) + position)
    row = mix(row ^ mix(site))
    x = (row & m32) ^ (mix(feature) >> 32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & m32
    x = (x + (row >> 32)) & m32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & m32
    signed = x - 2**32 if x >> 31 else x
    return signed >= round(p * 2**32) - 2**31


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 123456), (-1, 3), (2**70 + 5, 2**40)])
def test_mask_matches_a_reference_in_python_integers(seed, step):
    samples, positions, features = [0, 5, 2**40 + 1], [0, 1, 131071], [0, 3, 8191]
    where = DropoutAddress(seed, step, torch.tensor(samples), torch.tensor(positions))
    found = keep_mask(where.site_keys(9, 8192), 0.3)[..., features].flatten().tolist()
    elements = itertools.product(samples, positions, features)
    assert found == [reference(seed, step, 9, *element, 0.3) for element in elements]


def test_mask_is_pinned_to_the_first_release():
    """A run resumed by a later version must go on with the same masks."""
    bits = mask(address(seed=1, step=2), site=3).flatten().to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == "fa156b2f8ebf443f"


def test_the_mask_of_a_shard_is_the_shard_of_the_mask():
    whole = mask(address(seed=3, step=4), site=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        picks = []
        for size in whole.shape[:2]:  # any subset in any order, single elements and nothing among them
            count = int(torch.randint(0, size + 1, (), generator=generator))
            picks.append(torch.randperm(size, generator=generator)[:count])
        samples, positions = picks
        part = mask(DropoutAddress(3, 4, samples, positions), 5)
        assert torch.equal(part, whole[samples][:, positions])


def correlation(one: torch.Tensor, other: torch.Tensor, p: float) -> float:
    """In standard errors: centred products of independent draws are uncorrelated, with variance (p (1 - p))^2 each."""
    products = (one.double() - (1 - p)) * (other.double() - (1 - p))
    return (products.sum() / (math.sqrt(products.numel()) * p * (1 - p))).item()


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"seed": 2**32}, {"step": 2**32}])
def test_seed_and_step_give_an_unrelated_mask(other):
    one, two = (mask(address(samples=32, positions=64, **number)) for number in ({}, other))
    assert abs(correlation(one, two, 0.25)) < 5


def test_every_site_has_a_mask_of_its_own():
    sites = [0] + [dropout_site_index(layer, branch) for layer in range(3) for branch in (0, 1)]
    assert len(set(sites)) == 7
    masks = [mask(address(samples=32, positions=64), site) for site in sites]
    assert all(abs(correlation(a, b, 0.25)) < 5 for a, b in itertools.combinations(masks, 2))


AXES = ("step", "site", "sample", "position", "feature")


@pytest.fixture(scope="module", params=[0.1, 0.5, 0.9])
def grid(request):
    """(p, draws): the mask over 4 steps, 4 sites, 24 samples, 48 positions and 64 features, minus its mean."""
    p = request.param
    draws = [[mask(address(11, step, 24, 48), site, 64, p) for site in range(4)] for step in range(4)]
    return p, torch.stack([torch.stack(sites) for sites in draws]).double() - (1 - p)


@pytest.mark.parametrize("kept", [axes for n in (1, 2, 3) for axes in itertools.combinations(range(5), n)])
def test_keep_rate_is_uniform_along_every_axis_pair_and_triple(grid, kept):
    p, draws = grid
    cells = draws.sum([axis for axis in range(5) if axis not in kept])
    count, variance = cells.numel(), draws.numel() / cells.numel() * p * (1 - p)
    # A squared binomial in units of its variance v has mean 1 and variance at most 2 + 1 / v. The bound on the sum of
    # the cells is five standard deviations, on either side: a mask that is too regular is wrong too.
    assert abs((cells**2).sum().item() / variance - count) < 5 * math.sqrt(count * (2 + 1 / variance))
    # Bernstein: one cell of the `count` is further off than this with a probability of at most 1e-6.
    log = math.log(2 * count / 1e-6)
    assert cells.abs().max() < log / 3 + math.sqrt(log**2 / 9 + 2 * log * variance)


@pytest.mark.parametrize("last", [4, 3, 2])
def test_no_two_rows_or_columns_of_a_mask_are_equal(grid, last):
    p, draws = grid
    lines = draws.movedim(last, -1).flatten(0, 3)
    distinct = len(torch.unique(lines > 0, dim=0))
    agree = ((1 - p) ** 2 + p**2) ** lines.shape[1]  # chance that two given lines are equal
    expected = agree * len(lines) ** 2 / 2
    assert len(lines) - distinct <= expected + 5 * math.sqrt(expected)


@pytest.mark.parametrize("axis", range(5))
def test_neighbours_at_any_distance_are_uncorrelated(grid, axis):
    p, draws = grid
    for distance in (1, 2, 3, 4, 8, 16, 32):
        if distance < draws.shape[axis]:
            rest = draws.shape[axis] - distance
            products = draws.narrow(axis, 0, rest) * draws.narrow(axis, distance, rest)
            z = products.sum().item() / (math.sqrt(products.numel()) * p * (1 - p))
            assert abs(z) < 5, f"{AXES[axis]} and the one {distance} further on: {z:.1f} standard errors"


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("distance", [1, 2, 4, 16])
def test_rows_and_features_do_not_interact(grid, axis, distance):
    """Rows and features are hashed apart and joined late; a weak join shows in squares of two rows and two features."""
    p, draws = grid
    squares = draws[..., :-distance] * draws[..., distance:]
    squares = squares.narrow(axis, 0, draws.shape[axis] - 1) * squares.narrow(axis, 1, draws.shape[axis] - 1)
    assert abs(squares.sum().item()) < 5 * math.sqrt(squares.numel()) * (p * (1 - p)) ** 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_mask_is_the_same_in_every_dtype(dtype):
    keys = address().site_keys(1, 32)
    ones = torch.ones(6, 10, 32)
    assert torch.equal(dropout(ones.to(dtype), 0.25, keys) != 0, dropout(ones, 0.25, keys) != 0)
    assert dropout(ones.to(dtype), 0.25, keys).dtype == dtype


def test_kept_elements_and_their_gradients_are_scaled():
    hidden = torch.randn(6, 10, 32, dtype=torch.float64, requires_grad=True)
    out = dropout(hidden, 0.25, address().site_keys(1, 32))
    out.sum().backward()
    kept = mask(address(), 1)
    assert torch.allclose(out, torch.where(kept, hidden / 0.75, 0.0), rtol=1e-15, atol=0)
    assert torch.allclose(hidden.grad, kept.double() / 0.75, rtol=1e-15, atol=0)


def test_probability_zero_keeps_everything():
    assert mask(address(), p=0.0).all()


def test_mask_has_a_shape_on_the_meta_device():
    with torch.device("meta"):
        assert mask(address()).shape == (6, 10, 32)


def dropping_model(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config).double()
    init_parameters(model, 0)
    return model.train()


TOKENS = torch.arange(60).view(6, 10) % 64


def test_training_without_an_address_is_refused():
    with pytest.raises(ValueError, match=r"dropout=0\.25 in training needs a DropoutAddress"):
        dropping_model()(TOKENS)


def test_evaluation_drops_nothing():
    still = dataclasses.replace(CONFIG, dropout=0.0)
    assert torch.equal(dropping_model().eval()(TOKENS, address=address()), dropping_model(still)(TOKENS))


def test_model_drops_at_the_embedding_and_at_both_branches_of_each_block(monkeypatch):
    used = []
    keys = DropoutAddress.site_keys
    monkeypatch.setattr(
        DropoutAddress, "site_keys", lambda self, site, width: used.append(site) or keys(self, site, width)
    )
    dropping_model()(TOKENS, address=address())
    assert sorted(used) == [0, 1, 2, 3, 4]


def test_each_branch_of_a_block_is_dropped_with_its_own_mask():
    model = dropping_model()
    block = model.model.layers[1]
    block.self_attn.forward = lambda hidden, rotary: torch.ones_like(hidden)
    block.mlp.forward = lambda hidden: torch.full_like(hidden, 10.0)
    out = block(torch.zeros(6, 10, 32, dtype=torch.float64), None, model.model.dropout_keys(1, address(step=7)))
    attention, feed_forward = (mask(address(step=7), dropout_site_index(1, branch)) for branch in (0, 1))
    assert torch.allclose(out, (attention + 10.0 * feed_forward).double() / 0.75, rtol=1e-15, atol=0)


def test_loss_and_gradients_of_shards_add_up_to_those_of_the_batch():
    def gradients(model):
        return {name: p.grad for name, p in model.named_parameters()}

    whole, cut = dropping_model(), dropping_model()
    loss, _ = whole(TOKENS, TOKENS, address=address(step=5))
    loss.backward()
    total = 0.0
    for samples in (torch.tensor([4, 0]), torch.tensor([1, 2, 3, 5])):
        where = DropoutAddress(0, 5, samples, torch.arange(10))
        part, _ = cut(TOKENS[samples], TOKENS[samples], address=where)
        part.backward()
        total += part.item()
    assert abs(total - loss.item()) < 1e-12 * loss.item()
    for name, gradient in gradients(cut).items():
        # Sums over 60 tokens in another order, float64: some hundred roundings of 2e-16.
        assert (gradient - gradients(whole)[name]).abs().max() < 1e-12 * gradients(whole)[name].abs().max(), name


def test_recomputation_replays_the_same_mask():
    plain, recomputed = dropping_model(), dropping_model()
    for layer in recomputed.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    for model in (plain, recomputed):
        model(TOKENS, TOKENS, address=address())[0].backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
