"""Tests of split_backward: the reference is torch's own backward, in one go and in float64."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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
    """Forward under WeightsLater: (the output, the list of halves)."""
    halves = []
    with answer.DeferWeightGradients({weights[name]: name for name in names}, halves):
        out = run(weights, x)
    return out, halves


def reference(x, arriving):
    """(gradient of x, gradients of the weights by name) by torch's backward."""
    weights, x = layers(), x.detach().clone().requires_grad_()
    run(weights, x).backward(arriving)
    return x.grad, {name: weight.grad for name, weight in weights.items()}


def later(answer, halves):
    """What the halves come to, added up by name."""
    total = {}
    for half in halves:
        grad = answer.weight_gradient(half)
        total[half[0]] = total.get(half[0], 0) + grad
    return total


@test(points=4)
def both_halves_are_torchs_backward(answer):
    """The input has its gradient after backward; the weights get theirs from the halves, whatever the shape of x."""
    for shape in ((1, 4), (5, 4), (2, 3, 4)):
        weights, x = layers(), draw(3, *shape).requires_grad_()
        arriving = draw(4, *shape[:-1], 3)
        out, halves = split(answer, weights, x)
        out.backward(arriving)
        grad, grads = reference(x, arriving)
        case = f"x of shape {shape}"
        expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE, case=case)
        expect("the halves that are left, by name", sorted(half[0] for half in halves), ["first", "second"], case=case)
        for name, got in later(answer, halves).items():
            expect(f"the gradient of the {name} weight", got, grads[name], tolerance=TOLERANCE, case=case)


@test(points=4)
def backward_leaves_the_weights_alone(answer):
    """Backward computes the gradient of the input and no more; the hooks of the weights are not called."""
    weights, x = layers(), draw(3, 2, 3, 4).requires_grad_()
    called = []
    for name, weight in weights.items():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    with FlopCounterMode(display=False) as forward:
        out, halves = split(answer, weights, x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    with FlopCounterMode(display=False) as weight_half:
        later(answer, halves)
    once = forward.get_total_flops()
    counts = {"backward": backward.get_total_flops(), "the halves": weight_half.get_total_flops()}
    for what, got in counts.items():
        if got != once:
            raise Wrong("wrong", f"floating-point operations in {what}: forward has {once}", str(once), str(got))
    expect("hooks of weights that backward called", called, [])
    expect("weights that have a .grad", [name for name, weight in weights.items() if weight.grad is not None], [])


@test(points=4)
def halves_wait_for_their_turn(answer):
    """Micro-batches leave halves of their own, and can be worked off in any order."""
    weights, total = layers(), {"first": 0, "second": 0}
    left = []
    for salt in (5, 6, 7):
        x, arriving = draw(salt, 2, salt, 4).requires_grad_(), draw(10 + salt, 2, salt, 3)
        out, halves = split(answer, weights, x)
        out.backward(arriving)
        grad, grads = reference(x, arriving)
        expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE)
        left.append(halves)
        total = {name: total[name] + grads[name] for name in total}
    got = later(answer, [half for halves in reversed(left) for half in reversed(halves)])
    for name in total:
        expect(
            f"the gradient of the {name} weight over three micro-batches", got[name], total[name], tolerance=TOLERANCE
        )


@test(points=3)
def what_is_not_named_is_whole(answer):
    """Only the weights asked for are split, and a layer whose input takes no gradient is left whole."""
    weights, x = layers(), draw(3, 5, 4).requires_grad_()
    out, halves = split(answer, weights, x, names=("second",))
    arriving = draw(4, 5, 3)
    out.backward(arriving)
    grad, grads = reference(x, arriving)
    expect("the gradient of x", x.grad, grad, tolerance=TOLERANCE)
    expect("the .grad of a weight that was not asked for", weights["first"].grad, grads["first"], tolerance=TOLERANCE)
    got = later(answer, halves)
    expect("weights that left a half", sorted(got), ["second"])
    expect("the gradient of the second weight", got["second"], grads["second"], tolerance=TOLERANCE)
    weights = layers()
    out, halves = split(answer, weights, x.detach())
    out.backward(arriving)
    expect("weights that left a half, when x takes no gradient", [half[0] for half in halves], ["second"])
    expect("the .grad of the first weight then", weights["first"].grad, grads["first"], tolerance=TOLERANCE)
