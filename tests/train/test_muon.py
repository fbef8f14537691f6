"""Muon's update: that of the singular values, and torch's own."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.train.muon import COEFFICIENTS, Muon, orthogonal, scale

SHAPES = [(4, 4), (3, 8), (8, 3), (1, 5), (5, 1), (33, 16)]
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


def muon_group(parameters, shapes, momentum=0.95, steps=5, **more):
    return {"params": parameters, "shapes": shapes, "momentum": momentum, "steps": steps, **more}


def drawn(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    steps=st.integers(1, 6),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_every_singular_value_goes_through_the_polynomial(shape, steps, seed, size):
    matrix = drawn(*shape, seed=seed) * size
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = COEFFICIENTS
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    # An iteration multiplies an error by at most the slope at 0, 3.45; twelve terms a sum, some ten operations.
    tolerance = 3.45**steps * 12 * 10 * 2**-53
    assert torch.allclose(orthogonal(matrix, steps), u * values @ v, rtol=0, atol=tolerance)


def test_five_steps_bring_singular_values_near_one():
    matrix = drawn(40, 24)
    values = torch.linalg.svdvals(orthogonal(matrix, 5))
    assert values.min() > 0.65 and values.max() < 1.25


def test_a_gradient_of_zeros_changes_nothing_but_by_decay():
    weight = torch.ones(3, 4, requires_grad=True)
    weight.grad = torch.zeros(3, 4)
    Muon([muon_group([weight], [(3, 4)], weight_decay=0.5)], **ADAMW).step()
    assert torch.equal(weight.detach(), torch.full((3, 4), 1 - 0.01 * 0.5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torchs_muon(shape, dtype, monkeypatch):
    # torch iterates in bfloat16; without that its numbers are comparable to the last digits.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    ours, theirs = drawn(*shape, dtype=dtype).requires_grad_(), drawn(*shape, dtype=dtype).requires_grad_()
    mine = Muon([muon_group([ours], [shape], momentum=0.9, weight_decay=0.1)], **ADAMW)
    reference = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ours.grad, theirs.grad = drawn(*shape, seed=step, dtype=dtype), drawn(*shape, seed=step, dtype=dtype)
        mine.step()
        reference.step()
        # 3.45**5 = 490 is what five iterations make of an error; an update is lr * scale, four of them add up.
        update = 490 * 33 * 10 * torch.finfo(dtype).eps * 0.01 * scale(shape)
        assert (ours - theirs).abs().max() <= (step + 1) * update + torch.finfo(dtype).eps * 8
    assert not torch.equal(ours.detach(), drawn(*shape, dtype=dtype))


def test_torchs_muon_as_it_is_agrees_to_bfloat16():
    shape = (16, 32)
    ours, theirs = drawn(*shape, dtype=torch.float32), drawn(*shape, dtype=torch.float32)
    ours.requires_grad_(), theirs.requires_grad_()
    ours.grad = theirs.grad = drawn(*shape, seed=5, dtype=torch.float32)
    Muon([muon_group([ours], [shape], weight_decay=0.0)], **ADAMW).step()
    torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    start = drawn(*shape, dtype=torch.float32)
    # Rounded to 8 bits at the start, what is near singular is off by much; on the whole it is the same direction.
    mine, other = (ours.detach() - start).flatten(), (theirs.detach() - start).flatten()
    assert torch.cosine_similarity(mine, other, dim=0) > 0.99


def test_an_update_has_the_root_mean_square_of_adamws():
    """0.2 (Liu et al. 2025, section 2.2): of an orthogonal (m, n) matrix it is 1 / sqrt(max(m, n)), before scaling."""
    for shape in [(64, 64), (32, 96), (96, 32)]:
        q = torch.linalg.qr(drawn(max(shape), min(shape)))[0]
        q = q if shape[0] >= shape[1] else q.T
        assert (q * scale(shape)).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


def test_a_flat_master_gets_what_a_matrix_gets():
    whole, flat = drawn(6, 4).requires_grad_(), drawn(6, 4).flatten().requires_grad_()
    made = [Muon([muon_group([each], [(6, 4)], weight_decay=0.1)], **ADAMW) for each in (whole, flat)]
    for step in range(3):
        whole.grad, flat.grad = drawn(6, 4, seed=step), drawn(6, 4, seed=step).flatten()
        for optimizer in made:
            optimizer.step()
    assert torch.equal(whole.detach().flatten(), flat.detach())
    assert made[1].state[flat]["momentum_buffer"].shape == (24,)


def test_gradients_are_left_as_they_are():
    weight, grad = drawn(3, 4).requires_grad_(), drawn(3, 4, seed=7)
    weight.grad = grad.clone()
    Muon([muon_group([weight], [(3, 4)])], **ADAMW).step()
    assert torch.equal(weight.grad, grad)


def test_the_other_groups_are_adamws():
    ours, theirs, matrix = drawn(5).requires_grad_(), drawn(5).requires_grad_(), drawn(3, 4).requires_grad_()
    mine = Muon([{"params": [ours], "weight_decay": 0.3}, muon_group([matrix], [(3, 4)])], **ADAMW)
    reference = torch.optim.AdamW([theirs], **ADAMW, weight_decay=0.3)
    for step in range(3):
        ours.grad, theirs.grad, matrix.grad = drawn(5, seed=step), drawn(5, seed=step), drawn(3, 4, seed=step)
        mine.step()
        reference.step()
    assert torch.equal(ours, theirs) and set(mine.state[ours]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(mine.state[matrix]) == {"momentum_buffer"} and len(mine.param_groups) == 2


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_a_copy_goes_on_as_the_original(how):
    bias, matrix = drawn(5).requires_grad_(), drawn(3, 4).requires_grad_()
    groups = [{"params": [bias]}, muon_group([matrix], [(3, 4)], weight_decay=0.2)]
    first = Muon(groups, **ADAMW)

    def go(optimizer, step):
        bias, matrix = (group["params"][0] for group in optimizer.param_groups)
        bias.grad, matrix.grad = drawn(5, seed=step), drawn(3, 4, seed=step)
        optimizer.step()
        return bias.detach(), matrix.detach()

    go(first, 1)
    if how == "deepcopy":
        second = copy.deepcopy(first)
    else:
        parts = [each.detach().clone().requires_grad_() for each in (bias, matrix)]
        second = Muon([{"params": parts[:1]}, muon_group(parts[1:], [(3, 4)], weight_decay=0.9)], **ADAMW)
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # it holds tensors, not copies
    for ours, theirs in zip(go(first, 2), go(second, 2), strict=True):
        assert ours.data_ptr() != theirs.data_ptr() and torch.equal(ours, theirs)


def test_it_learns():
    """Towards a matrix, from zeros: as far as updates of a known size go, and no farther."""
    goal, weight = drawn(8, 8), torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    optimizer = Muon([muon_group([weight], [(8, 8)], weight_decay=0.0)], **ADAMW | {"lr": 0.05})
    for _ in range(400):
        optimizer.zero_grad()
        (weight - goal).square().sum().backward()
        optimizer.step()
    assert (weight - goal).norm() < 0.1 * goal.norm() and math.isfinite(weight.sum().item())
