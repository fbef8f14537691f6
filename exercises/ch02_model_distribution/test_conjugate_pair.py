"""Tests of conjugate_pair: integer values, so that sums are exact in any order."""

from dataclasses import replace

import torch

from exercises.conditions import Choices, Declaration, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, Wrong, expect, test

SHAPE = (2, 3, 5)


def numbers(salt, dtype=torch.float64):
    """Return integers of shape (2, 3, 5) that differ by element and by salt."""
    count = torch.arange(torch.Size(SHAPE).numel())
    return ((count * (salt + 3)) % 11 + salt).to(dtype).reshape(SHAPE)


def run(answer, world, network, dtype=torch.float64):
    """Multiply by a per-rank factor between the operators; return (replicated x, this rank's factor, the output)."""
    x, factor = numbers(20, dtype).requires_grad_(), numbers(world.rank, dtype).requires_grad_()
    return x, factor, answer.reduce_from_tp(answer.copy_to_tp(x, network.group) * factor, network.group)


def factors(world, dtype=torch.float64):
    """The sum of all ranks' factors."""
    return sum(numbers(rank, dtype) for rank in range(world.size))


@test(points=3, ranks=(2, 3, 4))
def forward_values(answer, world, network):
    """copy_to_tp changes no value; reduce_from_tp returns the sum over the ranks."""
    for dtype in (torch.float64, torch.float32):
        x, _, out = run(answer, world, network, dtype)
        expect("the result of copy_to_tp", answer.copy_to_tp(x, network.group), numbers(20, dtype))
        expect("the result of reduce_from_tp", out, numbers(20, dtype) * factors(world, dtype))
        expect("the dtype of the result of reduce_from_tp", str(out.dtype), str(dtype))


@test(points=4, ranks=(2, 3, 4))
def gradients_are_those_of_one_process(answer, world, network):
    """The input's gradient is summed over the ranks; a partial result gets the gradient of the output."""
    x, factor, out = run(answer, world, network)
    arriving = numbers(7)
    (out * arriving).sum().backward()
    expect("the gradient of this rank's factor", factor.grad, arriving * numbers(20))
    expect("the gradient of the input", x.grad, arriving * factors(world))


@test(points=3, ranks=(2, 4))
def one_all_reduce_each_way(answer, world, network):
    """One all-reduce in forward and one in backward: each rank sends at most 2 (ranks - 1) / ranks of a tensor."""
    group, sent = network.group, []
    x = numbers(20).requires_grad_()
    most = 2 * (world.size - 1) * -(-x.numel() // world.size) * x.element_size()

    def bytes_since(what, most):
        now = sum(record.wire_bytes for record in network.records)
        got = now - sum(sent)
        sent.append(got)
        if got > most:
            raise Wrong("wrong", f"bytes that a rank sends in {what}", f"at most {most}", str(got))

    inside = answer.copy_to_tp(x, group)
    bytes_since("copy_to_tp, forward", 0)
    out = answer.reduce_from_tp(inside * (world.rank + 1), group)
    bytes_since("reduce_from_tp, forward", most)
    (grad,) = torch.autograd.grad(out, inside, numbers(7), retain_graph=True)
    bytes_since("reduce_from_tp, backward", 0)
    torch.autograd.grad(inside, x, grad)
    bytes_since("copy_to_tp, backward", most)
    expect("whether anything was sent", sum(sent) > 0, True)


@test(points=3, ranks=(2, 3))
def arguments_are_not_modified(answer, world, network):
    """Inputs and incoming gradients, of any memory layout, are not modified."""
    part = numbers(world.rank).transpose(0, 2).requires_grad_()
    kept = part.detach().clone()
    out = answer.reduce_from_tp(part, network.group)
    expect("the sum of transposed inputs", out, factors(world).transpose(0, 2))
    expect("this rank's input afterwards", part.detach(), kept)
    x = numbers(20).requires_grad_()
    arriving = torch.full((), world.rank + 1.0, dtype=torch.float64).expand(SHAPE)
    (grad,) = torch.autograd.grad(answer.copy_to_tp(x, network.group), x, arriving)
    total = world.size * (world.size + 1) / 2
    expect("the sum of expanded gradients", grad, torch.full(SHAPE, total))
    arriving = numbers(world.rank)
    torch.autograd.grad(answer.copy_to_tp(x, network.group), x, arriving)
    expect("the incoming gradient, afterwards", arriving, numbers(world.rank))


def call_operator(answer, group, tensor, operator):
    """Return the output of an operator and the gradient of its input, for the gradient `tensor` of its output."""
    with torch.enable_grad():
        x = tensor.detach().clone().requires_grad_()
        out = getattr(answer, operator)(x, group)
        (grad,) = torch.autograd.grad(out, x, tensor.detach().clone())
    return out.detach().clone(), grad


def operator_reference(ranks, rank):
    own = ranks[rank]["tensor"]
    total = sum(exact(each["tensor"]) for each in ranks).to(own.dtype)
    own = own.detach().clone(memory_format=torch.contiguous_format)
    return (own, total) if ranks[0]["operator"] == "copy_to_tp" else (total, own)


DECLARATION = Declaration(
    inputs={"tensor": Tensors(dtypes=(torch.float64, torch.float32, torch.bfloat16))},
    call=call_operator,
    reference=operator_reference,
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (ranks[0]["tensor"].nbytes + 8 * len(ranks)),
)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any size, memory layout and dtype, whose numbers are kept; groups of only some ranks; calls are independent."""
    for operator in ("copy_to_tp", "reduce_from_tp"):
        inputs = {**DECLARATION.inputs, "operator": Choices((operator,))}
        check_conditions(replace(DECLARATION, inputs=inputs), answer, world, network)
