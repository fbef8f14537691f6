"""Tests of ulysses_attention: the reference is a softmax over the whole sequence, on one process, in float64."""

from functools import cache

import torch

from exercises.conditions import Declaration, Drawn, check_conditions
from exercises.sequence_layouts import LAYOUTS
from exercises.testing import CONDITION_RANKS, Wrong, expect, test

BATCH, HEADS, WIDTH = 2, 12, 3
KEY_HEADS = (12, 4, 2, 1)
TOLERANCE = 1e-12  # sums of a few dozen products of numbers of about 1, in float64 in another order
MOST = 4  # all-to-alls of a query's size, in forward and in backward: query, key, value and output


def draw(salt, heads, length, dtype=torch.float64):
    """Return a tensor (BATCH, heads, length, WIDTH) that is equal on all ranks."""
    return draw_shape(salt, BATCH, heads, length, WIDTH).to(dtype)


def draw_shape(salt, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def attend_causally(query, key, value):
    """Return causal attention over whole sequences in order; consecutive query heads share a key head."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)
    return out.transpose(1, 2).contiguous().transpose(1, 2)  # the memory layout of many kernels


def of_one_process(query, key, value, grad):
    """Return causal attention over the whole sequence, and the gradients of query, key and value."""
    with torch.enable_grad():
        leaves = [x.double().detach().requires_grad_() for x in (query, key, value)]
        out = attend_causally(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


class Case:
    """This rank's tokens of a sequence, and its part of the output and gradients of one process."""

    def __init__(self, group, layout, each, key_heads, heads=HEADS):
        self.layout, self.group = layout, group
        self.own = LAYOUTS[layout](group.size, each)[group.rank]
        self.full = [draw(salt, n, group.size * each) for salt, n in enumerate((heads, key_heads, key_heads, heads))]
        self.leaves = [x[:, :, self.own].contiguous().requires_grad_() for x in self.full[:3]]
        self.grad = self.full[3][:, :, self.own].contiguous()
        self.name = f"{group.size} ranks, {layout} layout, {each} tokens each, {heads} heads, {key_heads} key heads"
        self.attended = []

    def attend(self, *inputs):
        self.attended.append([x.detach().clone() for x in inputs])
        return attend_causally(*inputs)

    def call(self, answer):
        return answer.ulysses_attention(*self.leaves, self.group, self.attend, zigzag=self.layout == "zigzag")

    def backward(self, out):
        expect("whether the output has a gradient function", out.requires_grad, True, case=self.name)
        out.backward(self.grad)

    def check(self, answer):
        out = self.call(answer)
        expected, *gradients = (x[:, :, self.own] for x in of_one_process(*self.full))
        expect("shape of the output", list(out.shape), list(expected.shape), case=self.name)
        expect("the output", out, expected, tolerance=TOLERANCE, case=self.name)
        self.backward(out)
        for name, leaf, gradient in zip(("query", "key", "value"), self.leaves, gradients, strict=True):
            if leaf.grad is None:
                raise Wrong("wrong", f"the gradient of {name}", "a tensor", "None", case=self.name)
            expect(f"the gradient of {name}", leaf.grad, gradient, tolerance=TOLERANCE, case=self.name)


@test(points=6, ranks=(1, 2, 3, 4))
def attention_of_one_process(answer, world, network):
    """Output and gradients of this rank's tokens are those of one process, in both layouts, with grouped heads."""
    for layout, each in (("contiguous", 1), ("contiguous", 3), ("zigzag", 2), ("zigzag", 6)):
        for key_heads in KEY_HEADS:
            Case(network.group, layout, each, key_heads).check(answer)
    if world.size == 4:
        Case(network.divided_group, "zigzag", 4, 4).check(answer)
        Case(network.divided_group, "contiguous", 3, 1, heads=2).check(answer)


@test(points=5, ranks=(1, 2, 3, 4))
def exchanges_of_heads_and_tokens(answer, world, network):
    """`SwapShards` exchanges slices of two dimensions, such as heads and tokens, in rank order; gradients return."""
    n, rank = world.size, world.rank
    shapes = ((BATCH, n, n, WIDTH), (BATCH, 2 * n, 3 * n, WIDTH), (BATCH, 3 * n, 2 * n, WIDTH))
    cases = [(shape, *dims) for shape in shapes for dims in ((1, 2), (2, 1))]
    for shape, split, join in (*cases, ((n, 3, 2, 2 * n), 0, 3), ((3 * n, 2, n, 2), 2, 0)):
        full, grad = (draw_shape(salt, *shape) for salt in (5, 6))
        for layout in ("contiguous", "a view"):
            x, arriving = full.chunk(n, join)[rank].detach(), grad.chunk(n, split)[rank]
            if layout == "contiguous":
                x, arriving = x.contiguous(), arriving.contiguous()
            x.requires_grad_()
            case = f"split={split}, join={join}, x of shape {tuple(x.shape)}, {layout}, {n} ranks"
            result = answer.SwapShards.apply(x, split, join, network.group)
            expect("the result of SwapShards", result, full.chunk(n, split)[rank], case=case)
            expect("whether the result has a gradient function", result.requires_grad, True, case=case)
            (gradient,) = torch.autograd.grad(result, x, arriving)
            expect("the gradient of SwapShards' argument", gradient, grad.chunk(n, join)[rank], case=case)
            expect("the argument afterwards", x, full.chunk(n, join)[rank], case=case)
            expect("the arriving gradient afterwards", arriving, grad.chunk(n, split)[rank], case=case)


@test(points=3, ranks=(1, 2, 3, 4))
def attends_once_to_whole_sequences(answer, world, network):
    """`attend` is called once, with all tokens in the order of their positions, of a rank's part of the heads."""
    n = HEADS // world.size
    for layout, each in (("contiguous", 3), ("zigzag", 4)):
        for key_heads in KEY_HEADS:
            case = Case(network.group, layout, each, key_heads)
            case.call(answer)
            expect("calls of attend", len(case.attended), 1, case=case.name)
            [inputs] = case.attended
            for name, got, full in zip(("query", "key", "value"), inputs, case.full, strict=False):
                heads = got.shape[1] if got.dim() == 4 else 0
                if heads == 0 or n % heads or (name == "query" and heads != n):
                    wanted = f"{n} heads" if name == "query" else f"{n} heads, or fewer that divide {n}"
                    raise Wrong("wrong", f"the {name} that attend gets", wanted, f"shape {tuple(got.shape)}", case.name)
                full = full.repeat_interleave(HEADS // full.shape[1], 1)[:, world.rank * n : (world.rank + 1) * n]
                expect(f"the {name} that attend gets", got.repeat_interleave(n // heads, 1), full, case=case.name)


@test(points=2, ranks=(2, 3, 4))
def heads_that_do_not_divide(answer, world, network):
    """A ValueError, before anything is sent, if the ranks do not divide the query heads."""
    for heads, key_heads in ((world.size + 1, 1), (2 * world.size - 1, 2 * world.size - 1), (1, 1)):
        case, before = Case(network.group, "contiguous", 2, key_heads, heads), len(network.records)
        try:
            got = case.call(answer)
        except ValueError:
            pass
        else:
            raise Wrong("wrong", "heads that the ranks do not divide", "ValueError", str(tuple(got.shape)), case.name)
        expect("operations before the error", [one.name for one in network.records[before:]], [], case=case.name)


@test(points=2, ranks=(2, 3, 4))
def a_few_all_to_alls(answer, world, network):
    """Forward and backward each send at most four times this rank's queries, in at most four all-to-alls."""
    for key_heads in KEY_HEADS:
        case = Case(network.group, "zigzag", 4, key_heads)
        before = len(network.records)
        out = case.call(answer)
        forward = len(network.records)
        case.backward(out)
        most = MOST * case.grad.nbytes * (world.size - 1) // world.size
        for what, records in (("forward", network.records[before:forward]), ("backward", network.records[forward:])):
            expect(f"operations other than all_to_all in {what}",
                   sorted({one.name for one in records} - {"all_to_all"}), [], case=case.name)  # fmt: skip
            for unit, sent, limit in (
                ("all-to-alls", len(records), MOST),
                ("bytes that this rank sends", sum(one.wire_bytes for one in records), most),
            ):
                if sent > limit:
                    raise Wrong("wrong", f"{unit} in {what}", f"at most {limit}", str(sent), case=case.name)


# The draws of every argument: layout, tokens per rank, heads per rank, dtype, and whether tensors are views.
DRAWS = (
    ("contiguous", 3, 1, torch.float64, False),
    ("zigzag", 4, 2, torch.float64, False),
    ("zigzag", 2, 1, torch.float32, False),
    ("contiguous", 1, 2, torch.float64, True),
)
INPUTS = ("query", "key", "value", "grad")


@cache
def full_sequence(number, ranks):
    """Return query, key, value and gradient of the output of a draw for the whole sequence, and the expected result."""
    _, each, heads, dtype, _ = DRAWS[number]
    heads, key_heads = heads * ranks, ranks if number % 2 else 1
    sizes = (heads, key_heads, key_heads, heads)
    inputs = [draw(10 + salt, n, ranks * each, dtype) for salt, n in enumerate(sizes)]
    return inputs, of_one_process(*inputs)


def own_tokens(name, number, rank, ranks):
    """Return a rank's part of one argument of a draw."""
    layout, each, _, _, is_view = DRAWS[number]
    inputs, _ = full_sequence(number, ranks)
    x = inputs[INPUTS.index(name)][:, :, LAYOUTS[layout](ranks, each)[rank]]
    return x.mT.contiguous().mT if is_view else x.contiguous()


def attention_reference(ranks, rank):
    number = ranks[0]["draw"]
    layout, each, _, dtype, _ = DRAWS[number]
    own = LAYOUTS[layout](len(ranks), each)[rank]
    _, results = full_sequence(number, len(ranks))
    return tuple(x[:, :, own].to(dtype) for x in results)


def call_ulysses(answer, group, query, key, value, grad, draw):
    """Return the output and the gradients of query, key and value."""
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = answer.ulysses_attention(*leaves, group, attend_causally, DRAWS[draw][0] == "zigzag")
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def declarations():
    """Return a declaration for each draw, which selects all arguments together."""
    for number in range(len(DRAWS)):
        inputs = {
            name: Drawn(lambda rank, ranks, _, number=number, name=name: own_tokens(name, number, rank, ranks))
            for name in INPUTS
        }
        yield Declaration(
            inputs={**inputs, "draw": Drawn(lambda rank, ranks, _, number=number: number)},
            call=call_ulysses,
            reference=attention_reference,
            roundings=100,  # sums over at most 28 keys or queries, of products and exponentials
            max_bytes=lambda ranks: 2 * MOST * (len(ranks) - 1) * ranks[0]["query"].nbytes,
        )


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """In float64 and float32, on 1 to 7 ranks and in groups of only some ranks; calls do not influence each other."""
    for declaration in declarations():
        check_conditions(declaration, answer, world, network)
