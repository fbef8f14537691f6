"""Tests of conjugate_pair: whole numbers, so that sums are exact in any order."""

import torch

from exercises.testing import Wrong, expect, test

SHAPE = (2, 3, 5)


def numbers(salt, dtype=torch.float64):
    """Whole numbers of shape (2, 3, 5) that differ by element and by salt."""
    count = torch.arange(torch.Size(SHAPE).numel())
    return ((count * (salt + 3)) % 11 + salt).to(dtype).reshape(SHAPE)


def run(answer, world, network, dtype=torch.float64):
    """A part of each rank's own between the two: (x, this rank's factor, what leaves). x is the same on all ranks."""
    x, factor = numbers(20, dtype).requires_grad_(), numbers(world.rank, dtype).requires_grad_()
    return x, factor, answer.reduce_from_tp(answer.copy_to_tp(x, network.group) * factor, network.group)


def factors(world, dtype=torch.float64):
    """The sum of all ranks' factors."""
    return sum(numbers(rank, dtype) for rank in range(world.size))


@test(points=3, ranks=(2, 3, 4))
def values_on_the_way_in_and_out(answer, world, network):
    """`copied` changes no value; `summed` gives every rank the sum of all parts."""
    for dtype in (torch.float64, torch.float32):
        x, _, out = run(answer, world, network, dtype)
        expect("what enters", answer.copy_to_tp(x, network.group), numbers(20, dtype))
        expect("what leaves", out, numbers(20, dtype) * factors(world, dtype))
        expect("the dtype of what leaves", str(out.dtype), str(dtype))


@test(points=4, ranks=(2, 3, 4))
def gradients_are_those_of_one_process(answer, world, network):
    """The gradient of what enters is the sum of all parts'; that of a part is the gradient of what leaves."""
    x, factor, out = run(answer, world, network)
    arriving = numbers(7)
    (out * arriving).sum().backward()
    expect("the gradient of this rank's part", factor.grad, arriving * numbers(20))
    expect("the gradient of what enters", x.grad, arriving * factors(world))


@test(points=3, ranks=(2, 4))
def one_sum_each_way(answer, world, network):
    """One sum of a whole tensor forward and one backward: at most 2 (ranks - 1) / ranks of it sent by a rank."""
    group, sent = network.group, []
    x = numbers(20).requires_grad_()
    most = 2 * (world.size - 1) * -(-x.numel() // world.size) * x.element_size()

    def bytes_since(what, most):
        now = sum(record.wire_bytes for record in network.records)
        got = now - sum(sent)
        sent.append(got)
        if got > most:
            raise Wrong("wrong", f"bytes that a rank sends {what}", f"at most {most}", str(got))

    inside = answer.copy_to_tp(x, group)
    bytes_since("on the way in, forward", 0)
    out = answer.reduce_from_tp(inside * (world.rank + 1), group)
    bytes_since("on the way out, forward", most)
    (grad,) = torch.autograd.grad(out, inside, numbers(7), retain_graph=True)
    bytes_since("on the way out, backward", 0)
    torch.autograd.grad(inside, x, grad)
    bytes_since("on the way in, backward", most)
    expect("whether anything was sent", sum(sent) > 0, True)


@test(points=3, ranks=(2, 3))
def what_is_given_is_left_alone(answer, world, network):
    """The tensors that come in, and gradients in any memory layout, are as they were."""
    part = numbers(world.rank).transpose(0, 2).requires_grad_()
    kept = part.detach().clone()
    out = answer.reduce_from_tp(part, network.group)
    expect("the sum of transposed parts", out, factors(world).transpose(0, 2))
    expect("this rank's part afterwards", part.detach(), kept)
    x = numbers(20).requires_grad_()
    arriving = torch.full((), world.rank + 1.0, dtype=torch.float64).expand(SHAPE)
    (grad,) = torch.autograd.grad(answer.copy_to_tp(x, network.group), x, arriving)
    total = world.size * (world.size + 1) / 2
    expect("the sum of gradients that are one number, expanded", grad, torch.full(SHAPE, total))
    arriving = numbers(world.rank)
    torch.autograd.grad(answer.copy_to_tp(x, network.group), x, arriving)
    expect("the gradient that came in, afterwards", arriving, numbers(world.rank))
