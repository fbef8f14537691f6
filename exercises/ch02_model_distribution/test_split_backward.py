"""Tests of split_backward: the reference is torch's unsplit backward, in float64."""

import torch
import torch.nn.functional as F
from torch import nn

from exercises.observations import count_flops
from exercises.testing import Wrong, expect, test

TOLERANCE = 1e-12  # sums of less than a hundred terms of about 1, in float64 in another order


def draw(salt, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def layers():
    """Two linear layers of different shapes, (in 4, out 6) and (in 6, out 3)."""
    return {"first": nn.Parameter(draw(1, 6, 4)), "second": nn.Parameter(draw(2, 3, 6))}


def run(weights, x):
    return F.linear(F.linear(x, weights["first"]).tanh(), weights["second"])


def split(answer, weights, x, names=("first", "second")):
    """Run forward under DeferWeightGradients; return the output and the list of deferred gradients."""
    deferred = []
    with answer.DeferWeightGradients({weights[name]: name for name in names}, deferred):
        out = run(weights, x)
    return out, deferred


def reference(x, arriving):
    """Return the gradient of x and the weight gradients by name, by torch's backward."""
    weights, x = layers(), x.detach().clone().requires_grad_()
    run(weights, x).backward(arriving)
    return x.grad, {name: weight.grad for name, weight in weights.items()}


def later(answer, deferred):
    """Return the deferred weight gradients, summed by name."""
    total = {}
    for half in deferred:
        grad = answer.compute_weight_gradient(half)
        total[half[0]] = total.get(half[0], 0) + grad
    return total


@test(points=4)
def equals_torchs_backward(answer):
    """Backward computes the gradient of x, and compute_weight_gradient those of the weights, for any shape of x."""
    for shape in ((1, 4), (5, 4), (2, 3, 4)):
        weights, x = layers(), draw(3, *shape).requires_grad_()
        arriving = draw(4, *shape[:-1], 3)
        out, deferred = split(answer, weights, x)
        out.backward(arriving)
        grad, grads = reference(x, arriving)
        case = f"x of shape {shape}"
        expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE, case=case)
        expect(
            "the names of the deferred gradients", sorted(half[0] for half in deferred), ["first", "second"], case=case
        )
        for name, got in later(answer, deferred).items():
            expect(f"the gradient of the {name} weight", got, grads[name], tolerance=TOLERANCE, case=case)
        inside = x.detach() @ weights["first"].detach().T
        inputs = {"first": x.detach(), "second": inside.tanh()}
        for name, kept, _ in deferred:
            what = f"x of the entry of {name}, without its batch dimensions"
            expect(what, kept.flatten(0, -2), inputs[name].flatten(0, -2), tolerance=TOLERANCE, case=case)


@test(points=4)
def backward_defers_the_weight_gradient(answer):
    """Backward computes only the gradient of the input, and calls no hook of a weight."""
    weights, x = layers(), draw(3, 2, 3, 4).requires_grad_()
    called = []
    for name, weight in weights.items():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    with count_flops() as forward:
        out, deferred = split(answer, weights, x)
    with count_flops() as backward:
        out.sum().backward()
    with count_flops() as weight_half:
        later(answer, deferred)
    once = forward.get_total_flops()
    counts = {"backward": backward.get_total_flops(), "compute_weight_gradient": weight_half.get_total_flops()}
    for what, got in counts.items():
        if got != once:
            raise Wrong("wrong", f"floating-point operations in {what} (forward: {once})", str(once), str(got))
    expect("weight hooks called by backward", called, [])
    expect("weights that have a .grad", [name for name, weight in weights.items() if weight.grad is not None], [])


@test(points=4)
def several_micro_batches(answer):
    """Each micro-batch defers its own gradients, which can be computed in any order."""
    weights, total = layers(), {"first": 0, "second": 0}
    left = []
    for salt in (5, 6, 7):
        x, arriving = draw(salt, 2, salt, 4).requires_grad_(), draw(10 + salt, 2, salt, 3)
        out, deferred = split(answer, weights, x)
        out.backward(arriving)
        grad, grads = reference(x, arriving)
        expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE)
        left.append(deferred)
        total = {name: total[name] + grads[name] for name in total}
    got = later(answer, [half for deferred in reversed(left) for half in reversed(deferred)])
    for name in total:
        expect(
            f"the gradient of the {name} weight over three micro-batches", got[name], total[name], tolerance=TOLERANCE
        )


@test(points=2)
def a_weight_that_is_used_twice(answer):
    """Each use of a weight defers a gradient of its own."""
    weight, x, deferred = nn.Parameter(draw(1, 4, 4)), draw(3, 5, 4).requires_grad_(), []
    arriving = draw(4, 5, 4)
    with answer.DeferWeightGradients({weight: "both"}, deferred):
        out = F.linear(F.linear(x, weight).tanh(), weight)
    out.backward(arriving)
    other = weight.detach().clone().requires_grad_()
    F.linear(F.linear(x.detach(), other).tanh(), other).backward(arriving)
    expect("the names of the deferred gradients", [half[0] for half in deferred], ["both", "both"])
    expect("the gradient of the weight", later(answer, deferred)["both"], other.grad, tolerance=TOLERANCE)


@test(points=3)
def other_layers_keep_their_backward(answer):
    """Only the named weights are deferred, and not those of a layer with a bias or whose input needs no gradient."""
    weights, x = layers(), draw(3, 5, 4).requires_grad_()
    out, deferred = split(answer, weights, x, names=("second",))
    arriving = draw(4, 5, 3)
    out.backward(arriving)
    grad, grads = reference(x, arriving)
    expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE)
    expect("the .grad of a weight that is not named", weights["first"].grad, grads["first"], tolerance=TOLERANCE)
    got = later(answer, deferred)
    expect("deferred weights", sorted(got), ["second"])
    expect("the gradient of the second weight", got["second"], grads["second"], tolerance=TOLERANCE)
    weights = layers()
    out, deferred = split(answer, weights, x.detach())
    out.backward(arriving)
    expect("deferred weights if x needs no gradient", [half[0] for half in deferred], ["second"])
    expect(
        "the .grad of the first weight if x needs no gradient",
        weights["first"].grad,
        grads["first"],
        tolerance=TOLERANCE,
    )
    weight, bias, x = layers()["first"], draw(8, 6).requires_grad_(), draw(3, 5, 4).requires_grad_()
    deferred = []
    with answer.DeferWeightGradients({weight: "first"}, deferred):
        out = F.linear(x, weight, bias)
    arriving = draw(9, 5, 6)
    out.backward(arriving)
    expect("the output of a layer with a bias", out, x @ weight.T + bias, tolerance=TOLERANCE)
    expect("deferred weights of a layer with a bias", [half[0] for half in deferred], [])
    expect("the gradient of a layer's bias", bias.grad, arriving.sum(0), tolerance=TOLERANCE)
    expect("the .grad of the weight of a layer with a bias", weight.grad, arriving.T @ x, tolerance=TOLERANCE)
