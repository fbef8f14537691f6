"""Muon's update, against the polynomial of singular values and against torch.optim.Muon."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.train.muon import COEFFICIENTS, Muon, adamw_rms_scale, orthogonalize

SHAPES = [(4, 4), (3, 8), (8, 3), (1, 5), (5, 1), (33, 16)]
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


def muon_group(parameters, shapes, momentum=0.95, steps=5, **more):
    return {"params": parameters, "shapes": shapes, "momentum": momentum, "steps": steps, **more}


def random_tensor(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    steps=st.integers(1, 6),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_orthogonal_applies_the_polynomial_to_singular_values(shape, steps, seed, size):
    matrix = random_tensor(*shape, seed=seed) * size
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = COEFFICIENTS
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    # An iteration multiplies an error by at most the slope at 0, 3.45; twelve terms a sum, some ten operations.
    tolerance = 3.45**steps * 12 * 10 * 2**-53
    assert torch.allclose(orthogonalize(matrix, steps), u * values @ v, rtol=0, atol=tolerance)


def test_five_steps_bring_singular_values_near_one():
    matrix = random_tensor(40, 24)
    values = torch.linalg.svdvals(orthogonalize(matrix, 5))
    assert values.min() > 0.65 and values.max() < 1.25


def test_a_zero_gradient_only_decays_the_weight():
    weight = torch.ones(3, 4, requires_grad=True)
    weight.grad = torch.zeros(3, 4)
    Muon([muon_group([weight], [(3, 4)], weight_decay=0.5)], **ADAMW).step()
    assert torch.equal(weight.detach(), torch.full((3, 4), 1 - 0.01 * 0.5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_match_torchs_muon_iterated_in_full_precision(shape, dtype, monkeypatch):
    # torch iterates in bfloat16; without that its numbers are comparable to the last digits.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    ours, theirs = (
        random_tensor(*shape, dtype=dtype).requires_grad_(),
        random_tensor(*shape, dtype=dtype).requires_grad_(),
    )
    mine = Muon([muon_group([ours], [shape], momentum=0.9, weight_decay=0.1)], **ADAMW)
    reference = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ours.grad, theirs.grad = (
            random_tensor(*shape, seed=step, dtype=dtype),
            random_tensor(*shape, seed=step, dtype=dtype),
        )
        mine.step()
        reference.step()
        # 3.45**5 = 490 is what five iterations make of an error; an update is lr * scale, four of them add up.
        update = 490 * 33 * 10 * torch.finfo(dtype).eps * 0.01 * adamw_rms_scale(shape)
        assert (ours - theirs).abs().max() <= (step + 1) * update + torch.finfo(dtype).eps * 8
    assert not torch.equal(ours.detach(), random_tensor(*shape, dtype=dtype))


def test_steps_match_torchs_muon_up_to_bfloat16():
    shape = (16, 32)
    ours, theirs = random_tensor(*shape, dtype=torch.float32), random_tensor(*shape, dtype=torch.float32)
    ours.requires_grad_(), theirs.requires_grad_()
    ours.grad = theirs.grad = random_tensor(*shape, seed=5, dtype=torch.float32)
    Muon([muon_group([ours], [shape], weight_decay=0.0)], **ADAMW).step()
    torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    start = random_tensor(*shape, dtype=torch.float32)
    # Rounded to 8 bits at the start, what is near singular is off by much; on the whole it is the same direction.
    mine, other = (ours.detach() - start).flatten(), (theirs.detach() - start).flatten()
    assert torch.cosine_similarity(mine, other, dim=0) > 0.99


def test_an_update_has_the_rms_of_adamw():
    """0.2 (Liu et al. 2025, section 2.2): of an orthogonal (m, n) matrix it is 1 / sqrt(max(m, n)), before scaling."""
    for shape in [(64, 64), (32, 96), (96, 32)]:
        q = torch.linalg.qr(random_tensor(max(shape), min(shape)))[0]
        q = q if shape[0] >= shape[1] else q.T
        assert (q * adamw_rms_scale(shape)).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


def test_a_flat_master_is_updated_like_its_matrix():
    whole, flat = random_tensor(6, 4).requires_grad_(), random_tensor(6, 4).flatten().requires_grad_()
    made = [Muon([muon_group([each], [(6, 4)], weight_decay=0.1)], **ADAMW) for each in (whole, flat)]
    for step in range(3):
        whole.grad, flat.grad = random_tensor(6, 4, seed=step), random_tensor(6, 4, seed=step).flatten()
        for optimizer in made:
            optimizer.step()
    assert torch.equal(whole.detach().flatten(), flat.detach())
    assert made[1].state[flat]["momentum_buffer"].shape == (24,)


def test_a_step_does_not_change_gradients():
    weight, grad = random_tensor(3, 4).requires_grad_(), random_tensor(3, 4, seed=7)
    weight.grad = grad.clone()
    Muon([muon_group([weight], [(3, 4)])], **ADAMW).step()
    assert torch.equal(weight.grad, grad)


def test_groups_without_shapes_are_updated_by_adamw():
    ours, theirs, matrix = (
        random_tensor(5).requires_grad_(),
        random_tensor(5).requires_grad_(),
        random_tensor(3, 4).requires_grad_(),
    )
    mine = Muon([{"params": [ours], "weight_decay": 0.3}, muon_group([matrix], [(3, 4)])], **ADAMW)
    reference = torch.optim.AdamW([theirs], **ADAMW, weight_decay=0.3)
    for step in range(3):
        ours.grad, theirs.grad, matrix.grad = (
            random_tensor(5, seed=step),
            random_tensor(5, seed=step),
            random_tensor(3, 4, seed=step),
        )
        mine.step()
        reference.step()
    assert torch.equal(ours, theirs) and set(mine.state[ours]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(mine.state[matrix]) == {"momentum_buffer"} and len(mine.param_groups) == 2


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_a_copied_or_loaded_optimizer_continues_like_the_original(how):
    bias, matrix = random_tensor(5).requires_grad_(), random_tensor(3, 4).requires_grad_()
    groups = [{"params": [bias]}, muon_group([matrix], [(3, 4)], weight_decay=0.2)]
    first = Muon(groups, **ADAMW)

    def go(optimizer, step):
        bias, matrix = (group["params"][0] for group in optimizer.param_groups)
        bias.grad, matrix.grad = random_tensor(5, seed=step), random_tensor(3, 4, seed=step)
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


def test_muon_converges_to_a_target_matrix():
    """From zeros towards a target matrix, as far as updates of a known size reach."""
    goal, weight = random_tensor(8, 8), torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    optimizer = Muon([muon_group([weight], [(8, 8)], weight_decay=0.0)], **ADAMW | {"lr": 0.05})
    for _ in range(400):
        optimizer.zero_grad()
        (weight - goal).square().sum().backward()
        optimizer.step()
    assert (weight - goal).norm() < 0.1 * goal.norm() and math.isfinite(weight.sum().item())
