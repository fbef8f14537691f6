"""Tests of region_operators: integer values, so that sums are exact in any order."""

import itertools
from dataclasses import replace

import torch

from exercises.conditions import Choices, Declaration, Tensors, check_conditions, exact, reduced
from exercises.testing import CONDITION_RANKS, Wrong, expect, test

BATCH, TOKENS, FEATURES = 2, 3, 5  # tokens: of each rank
REGIONS = ("Region", "SequenceParallelRegion")


def numbers(salt, ranks, dtype=torch.float64):
    """Return integers (2, 3 ranks, 5) that differ by element and by salt."""
    shape = (BATCH, TOKENS * ranks, FEATURES)
    count = torch.arange(torch.Size(shape).numel())
    return ((count * (salt + 3)) % 11 + salt).to(dtype).reshape(shape)


def outside(kind, full, group):
    """Return what a rank has of a full tensor outside of the layers: all tokens, or its own."""
    return full if kind == "Region" else full.chunk(group.size, 1)[group.rank]


def groups_of(world, network):
    """Return the group of all ranks and, on 4 ranks, this rank's group of every other rank."""
    return [network.group, *([network.divided_group] if world.size == 4 else [])]


class Layer:
    """A layer that multiplies by a factor of each rank's own: input and output outside of it, and inside."""

    def __init__(self, answer, group, kind, dtype=torch.float64):
        self.kind, self.group, self.dtype = kind, group, dtype
        self.name = f"{kind}, {group.size} ranks, this is rank {group.rank}"
        self.x = outside(kind, numbers(20, group.size, dtype), group).clone().requires_grad_()
        self.factor = numbers(group.rank, group.size, dtype).requires_grad_()
        region = getattr(answer, kind)(group)
        self.inside = region.enter(self.x)
        self.out = region.leave(self.inside * self.factor)

    def factors(self):
        """Return the sum of all ranks' factors."""
        return sum(numbers(rank, self.group.size, self.dtype) for rank in range(self.group.size))

    def outside(self, full):
        return outside(self.kind, full, self.group)


@test(points=3, ranks=(1, 2, 3, 4))
def forward_values(answer, world, network):
    """enter gives every rank all tokens; leave gives the sum over the ranks, of all tokens or of the rank's own."""
    for group in groups_of(world, network):
        for kind in REGIONS:
            for dtype in (torch.float64, torch.float32):
                layer, every = Layer(answer, group, kind, dtype), numbers(20, group.size, dtype)
                expect("the result of enter", layer.inside, every, case=layer.name)
                expect("the result of leave", layer.out, layer.outside(every * layer.factors()), case=layer.name)
                expect("the dtype of the result of leave", str(layer.out.dtype), str(dtype), case=layer.name)
                region, part = getattr(answer, kind)(group), numbers(group.rank, group.size, dtype)
                expect("the result of gather", region.gather(layer.x.detach()), every, case=layer.name)
                expect("the result of reduce", region.reduce(part), layer.outside(layer.factors()), case=layer.name)


@test(points=5, ranks=(1, 2, 3, 4))
def gradients_are_those_of_one_process(answer, world, network):
    """The input's gradient is summed over the ranks; a partial result gets the gradient of the output."""
    for group in groups_of(world, network):
        for kind in REGIONS:
            layer, arriving = Layer(answer, group, kind), numbers(7, group.size)
            if not layer.out.requires_grad:
                raise Wrong("wrong", "whether the result has a gradient function", "yes", "no", case=layer.name)
            (layer.out * layer.outside(arriving)).sum().backward()
            expected = arriving * numbers(20, group.size)
            expect("the gradient of this rank's factor", layer.factor.grad, expected, case=layer.name)
            expected = layer.outside(arriving * layer.factors())
            expect("the gradient of the input", layer.x.grad, expected, case=layer.name)
    # Two operators, of which the first one has the last backward: functions of any tensor, which may change its shape.
    x, case = numbers(20, 1).requires_grad_(), "RegionOperator.apply(x, forward, backward), twice"
    inside = answer.RegionOperator.apply(x, lambda x: 2 * x[:, 1:], lambda grad: torch.cat((grad, 3 * grad), 1)[:, 1:])
    out = answer.RegionOperator.apply(inside, lambda x: x.sum(-1), lambda grad: grad[..., None] + torch.arange(5.0))
    expect("the result", out, 2 * numbers(20, 1)[:, 1:].sum(-1), case=case)
    out.backward(torch.ones_like(out))
    wanted = (torch.arange(5.0, dtype=torch.float64) + 1).expand(BATCH, 2, FEATURES)
    expect("the gradient of x", x.grad, torch.cat((wanted, 3 * wanted), 1)[:, 1:], case=case)


@test(points=4, ranks=(2, 3, 4))
def one_collective_where_one_is_needed(answer, world, network):
    """A region's four directions send an all-reduce, an all-gather or a reduce-scatter once, or nothing."""
    group, n = network.group, world.size
    once = BATCH * TOKENS * FEATURES * 8 * (n - 1)  # bytes that a rank sends in an all-gather or reduce-scatter
    most = {"Region": (0, 2 * once, 0, 2 * once), "SequenceParallelRegion": (once,) * 4}
    for kind in REGIONS:
        region, x = getattr(answer, kind)(group), outside(kind, numbers(20, n), group).clone().requires_grad_()
        before = len(network.records)

        def check_sent(what, bytes_at_most, case=f"{kind}, {n} ranks"):
            nonlocal before
            new, before = network.records[before:], len(network.records)
            names, sent = [record.name for record in new], sum(record.wire_bytes for record in new)
            if len(new) != bool(bytes_at_most):
                wanted = "one" if bytes_at_most else "none"
                raise Wrong("wrong", f"collectives in {what}", wanted, str(names), case=case)
            if sent > bytes_at_most:
                raise Wrong("wrong", f"bytes sent in {what}", f"at most {bytes_at_most}", str(sent), case=case)

        inside = region.enter(x)
        check_sent("enter, forward", most[kind][0])
        out = region.leave(inside * (world.rank + 1))
        check_sent("leave, forward", most[kind][1])
        (grad,) = torch.autograd.grad(out, inside, outside(kind, numbers(7, n), group), retain_graph=True)
        check_sent("leave, backward", most[kind][2])
        torch.autograd.grad(inside, x, grad)
        check_sent("enter, backward", most[kind][3])


@test(points=3, ranks=(2, 3))
def arguments_are_not_modified(answer, world, network):
    """Inputs and arriving gradients, of any memory layout, keep their values."""
    group, n = network.group, world.size
    total = sum(numbers(rank, n) for rank in range(n))
    for kind in REGIONS:
        region, case = getattr(answer, kind)(group), f"{kind}, {n} ranks"
        # The same numbers in another order of memory: tokens vary slowest, then features.
        part = numbers(world.rank, n).permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
        expect("the sum of permuted inputs", region.leave(part), outside(kind, total, group), case=case)
        expect("this rank's input of leave afterwards", part.detach(), numbers(world.rank, n), case=case)
        x = outside(kind, numbers(20, n), group).clone().requires_grad_()
        expanded = torch.full((), world.rank + 1.0, dtype=torch.float64).expand(BATCH, TOKENS * n, FEATURES)
        (grad,) = torch.autograd.grad(region.enter(x), x, expanded)
        wanted = torch.full_like(x, n * (n + 1) / 2)
        expect("the gradient of the input, from expanded gradients", grad, wanted, case=case)
        arriving = numbers(world.rank, n)
        torch.autograd.grad(region.enter(x), x, arriving)
        expect("the gradient that arrives at enter, afterwards", arriving, numbers(world.rank, n), case=case)
        arriving, inside = outside(kind, numbers(3, n), group).clone(), numbers(world.rank, n).requires_grad_()
        torch.autograd.grad(region.leave(inside), inside, arriving)
        wanted = outside(kind, numbers(3, n), group)
        expect("the gradient that arrives at leave, afterwards", arriving, wanted, case=case)
        expanded = torch.full((), world.rank + 1.0, dtype=torch.float64).expand(arriving.shape)
        (grad,) = torch.autograd.grad(region.leave(inside), inside, expanded)
        ranks = torch.arange(n).repeat_interleave(TOKENS) if kind == "SequenceParallelRegion" else world.rank
        wanted = (torch.zeros(TOKENS * n) + ranks + 1)[None, :, None].expand(BATCH, TOKENS * n, FEATURES)
        expect("the gradient of the input of leave, from expanded gradients", grad, wanted, case=case)


@test(points=2, ranks=(1, 2, 3, 4))
def reductions_without_gradient(answer, world, network):
    """sum_over_ranks returns a new tensor with the sum, maximum or minimum of the ranks' tensors, without gradient."""
    reductions = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    for group in groups_of(world, network):
        ranks = [numbers(rank, group.size) - 9 for rank in range(group.size)]
        layouts = {
            "of shape (b, s, h)": lambda x: x,
            "of float32": lambda x: x.float(),
            "permuted": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
            "a view of some features": lambda x: x[..., 1:3],
            "of shape (h,)": lambda x: x[1, 2],
            "of shape ()": lambda x: x[1, 2, 3],
        }
        for (op, reduce), (layout, view) in itertools.product(reductions.items(), layouts.items()):
            own, case = view(ranks[group.rank].clone()).requires_grad_(), f'"{op}" on {group.size} ranks, x {layout}'
            result = answer.sum_over_ranks(own, group, op)
            expect("the reduction", result, reduce(torch.stack([view(each) for each in ranks]), 0), case=case)
            expect("the dtype of the result", str(result.dtype), str(own.dtype), case=case)
            expect("whether it requires a gradient", result.requires_grad, False, case=case)
            expect("this rank's tensor afterwards", own.detach(), view(ranks[group.rank]), case=case)
            if result.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
                raise Wrong("wrong", "the memory of the result", "its own", "that of the argument", case=case)
        expect("the reduction without `op`", answer.sum_over_ranks(ranks[group.rank], group), sum(ranks))


def call_operator(answer, group, tensor, operator):
    """Return the output of an operator of Region and the gradient of its input, given the output's gradient.

    The operator gets three dimensions, as in a model: those that the tensor lacks are added in front.
    """
    added = (None,) * (3 - tensor.dim())
    with torch.enable_grad():
        x = tensor.detach().clone()[added].requires_grad_()
        out = getattr(answer.Region(group), operator)(x)
        (grad,) = torch.autograd.grad(out, x, tensor.detach().clone()[added])
    expect("the shapes of the result and of the gradient", [out.shape, grad.shape], [x.shape, x.shape])
    return tuple(each.detach().clone()[(0,) * len(added)] for each in (out, grad))


def operator_reference(ranks, rank):
    own = ranks[rank]["tensor"]
    total = sum(exact(each["tensor"]) for each in ranks).to(own.dtype)
    own = own.detach().clone(memory_format=torch.contiguous_format)
    return (own, total) if ranks[0]["operator"] == "enter" else (total, own)


OPERATORS = Declaration(
    inputs={"tensor": Tensors(dtypes=(torch.float64, torch.float32))},
    call=call_operator,
    reference=operator_reference,
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (ranks[0]["tensor"].nbytes + 8 * len(ranks)),
)


def activations(x, batch, sequence):
    """View (batch * sequence, h) as activations (batch, sequence, h), whose sequence varies slowest in memory."""
    return x.unflatten(0, (sequence, batch)).transpose(0, 1)


def gather_reference(ranks, rank):
    each = ranks[rank]["batch"]
    return torch.cat([activations(one["x"], each, len(one["x"]) // each) for one in ranks], 1)


def reduce_reference(ranks, rank):
    each = ranks[rank]["batch"]
    total = activations(reduced([one["x"] for one in ranks], "sum"), each, len(ranks[0]["x"]) // each)
    return total.chunk(len(ranks), 1)[rank].clone()


def call_sequence_operator(name):
    def call(answer, group, x, batch):
        return getattr(answer.SequenceParallelRegion(group), name)(activations(x, batch, len(x) // batch))

    return call


def tensors(numel):
    return Tensors(
        numel=numel,
        dtypes=(torch.float64, torch.float32),
        layouts=("slice", "transposed"),
        sizes=False,
        columns=2,
    )


# Batches of 2, 1, 3 and 6 sequences; a rank has 3, 6, 2 and 1 tokens of each.
GATHER = Declaration(
    inputs={"x": tensors(lambda ranks: 6), "batch": Choices((2, 1, 3, 6))},
    call=call_sequence_operator("enter"),
    reference=gather_reference,
    replicas=True,
    max_bytes=lambda ranks: (len(ranks) - 1) * len(ranks) * ranks[0]["x"].nbytes,
)
REDUCE = replace(
    GATHER,
    inputs={"x": tensors(lambda ranks: 6 * ranks), "batch": Choices((2, 1, 3, 6))},
    call=call_sequence_operator("leave"),
    reference=reduce_reference,
    replicas=False,
    max_bytes=lambda ranks: (len(ranks) - 1) * ranks[0]["x"].nbytes,
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any batch, tokens, layout and dtype, whose numbers are kept; groups of only some ranks; calls are independent."""
    for operator in ("enter", "leave"):
        inputs = {**OPERATORS.inputs, "operator": Choices((operator,))}
        check_conditions(replace(OPERATORS, inputs=inputs), answer, world, network)
    for declaration in (GATHER, REDUCE):
        # One rank alone may return what it was given.
        check_conditions(replace(declaration, shares=world.size == 1), answer, world, network)
