"""Tests of recomputed_block: the reference is the same block without recomputation, under torch's own autograd."""

import functools
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from exercises.conditions import Choices, Declaration, Growth, Tensors, check_conditions
from exercises.observations import PeakMemory
from exercises.testing import Wrong, expect, test
from minidist.comm import all_gather_object, all_reduce
from minidist.models.dropout import DropoutAddress, dropout

TOKENS, HIDDEN, INNER = 6, 4, 8
PEAK_TENSORS = 7  # of the largest size that a block makes, which may be in memory at the same time


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def keys(step):
    """Where a micro-batch is in the run: it decides the mask of its dropout."""
    address = DropoutAddress(seed=1, step=step, samples=torch.arange(1), positions=torch.arange(TOKENS))
    return address.site_keys(site=1, num_features=HIDDEN)


class Block(nn.Module):
    """A residual block with dropout, (1, tokens, h) -> the same; `runs` counts how often it has been run."""

    def __init__(self, seed, dtype=torch.float64):
        super().__init__()
        self.up = nn.Parameter(draw(seed, HIDDEN, INNER, dtype=dtype))
        self.down = nn.Parameter(draw(seed + 1, INNER, HIDDEN, dtype=dtype))
        self.runs = 0

    def forward(self, x, address):
        self.runs += 1
        hidden = torch.tanh(x @ self.up) @ self.down
        return x + dropout(torch.sin(hidden), 0.5, address)


class Stack:
    """Three blocks, one after the other; with `answer` each of them is recomputed."""

    def __init__(self, answer=None, dtype=torch.float64):
        self.blocks = [Block(10 * number, dtype) for number in range(3)]
        if answer is not None:
            for block in self.blocks:
                answer.recompute_block(block)

    def __call__(self, x, address):
        for block in self.blocks:
            x = block(x, address)
        return x

    def gradients(self):
        return [
            None if p.grad is None else p.grad.float().tolist() for block in self.blocks for p in block.parameters()
        ]

    def runs(self):
        return [block.runs for block in self.blocks]


class Run(nn.Module):
    """A block that computes `run(x, *arguments)`, recomputed by `answer`."""

    def __init__(self, answer, run):
        super().__init__()
        self.run = run
        answer.recompute_block(self)

    def forward(self, x, *arguments):
        return self.run(x, *arguments)


def inputs(seed, dtype=torch.float64):
    return draw(seed, 1, TOKENS, HIDDEN, dtype=dtype).requires_grad_()


def torchs_own(*_, **__):
    """What stands below torch.utils.checkpoint.checkpoint, for whoever comes there on a way that no guard sees."""
    raise Wrong("wrong", "torch.utils.checkpoint does the work: this exercise must be solved without it")


@test(points=4)
@mock.patch("torch.utils.checkpoint._checkpoint_without_reentrant_generator", torchs_own)
def equals_the_plain_block(answer):
    """Output and gradients are those without recomputation, bit for bit, with the dropout masks of the first run."""
    for dtype in (torch.float64, torch.bfloat16):
        found = []
        for stack in (Stack(dtype=dtype), Stack(answer, dtype)):
            x = inputs(1, dtype)
            out = stack(x, keys(step=3))
            out.float().square().sum().backward()
            found.append((out.float().tolist(), x.grad.float().tolist(), stack.gradients()))
        case = f"three blocks with dropout, in {dtype}".replace("torch.", "")
        expect("how often each block was run, forward and backward", stack.runs(), [2, 2, 2], case=case)
        plain = Stack(dtype=dtype)
        plain(inputs(1, dtype), keys(step=3)).float().sum().backward()
        expect("how often other blocks of this class were run", plain.runs(), [1, 1, 1], case="recompute_block(block)")
        for what, wanted, got in zip(("output", "gradient of the input", "gradients"), *found, strict=True):
            expect(f"the {what}", got, wanted, case=case)


@test(points=2)
def the_operation_alone(answer):
    """Recompute.apply runs and differentiates any function of a tensor, with other arguments or without."""
    anchor = torch.empty(0, requires_grad=True)
    for arguments in ((), (2.0,), (3.0, torch.tensor(0.5, dtype=torch.float64))):
        found = []
        for is_recomputed in (False, True):
            weight, x = draw(3, HIDDEN, HIDDEN).requires_grad_(), draw(4, TOKENS, HIDDEN).requires_grad_()

            def run(x, factor=1.0, shift=0.0, weight=weight):
                return torch.sin(x @ weight) * factor + shift

            out = answer.Recompute.apply(run, arguments, x, anchor) if is_recomputed else run(x, *arguments)
            out.square().sum().backward()
            found.append([out.tolist(), x.grad.tolist(), weight.grad.tolist()])
        case = f"Recompute.apply(run, {len(arguments)} arguments, hidden, anchor)"
        for what, wanted, got in zip(("output", "gradient of hidden", "gradient of a weight"), *found, strict=True):
            expect(f"the {what}", got, wanted, case=case)
    for shape in ((), (0,), (3,), (2, 1, 3, 2)):
        found = []
        for is_recomputed in (False, True):
            x = draw(4, *shape).requires_grad_()

            def run(x, times):
                return torch.stack([x.exp() * number for number in range(1, times + 1)])

            out = answer.Recompute.apply(run, (2,), x, anchor) if is_recomputed else run(x, 2)
            out.backward(torch.ones_like(out))
            found.append((tuple(out.shape), out.tolist(), x.grad.tolist()))
        case = f"hidden of shape {shape}, an output of shape {(2, *shape)}"
        for what, wanted, got in zip(("shape of the output", "output", "gradient of hidden"), *found, strict=True):
            expect(f"the {what}", got, wanted, case=case)


@test(points=2)
def saves_only_the_input(answer):
    """Between forward and backward a block's input is there, and nothing that was made inside of it."""
    weight = torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True)
    for needs_gradient in (True, False):
        made = []

        def run(x, scale, made=made):
            inside = (x * weight * scale).exp()
            made.append(StorageWeakRef(inside.untyped_storage()))
            return inside.sin().cos()

        x = inputs(1).requires_grad_(needs_gradient)
        out = Run(answer, run)(x, torch.full((), 0.5, dtype=torch.float64))
        case = "block(x, scale), which computes (x * weight * scale).exp() as a temporary"
        case += "" if needs_gradient else "; x needs no gradient"
        expect("whether that is still there before backward", not made[0].expired(), False, case=case)
        out.sum().backward()
    x = draw(1, 512, 64).requires_grad_().t()
    block = Run(answer, torch.sin)
    with PeakMemory() as memory:
        out = block(x)
    kept, case = memory.kept_bytes // 1024, "block(x) = x.sin(), where x is a transposed matrix of 256 KiB"
    expect("KiB of new memory between forward and backward: the output, and no copy of x", kept, 256, case=case)
    out.sum().backward()


@test(points=1)
def freed_during_backward(answer):
    """A recomputed tensor is freed as soon as the operation that needs it has done its backward."""
    made, gone = [], []

    def run(x):
        first = x.exp()
        second = first.exp()
        made.append([StorageWeakRef(each.untyped_storage()) for each in (first, second)])
        if first.requires_grad:
            first.register_hook(lambda _: gone.extend(reference.expired() for reference in made[-1]))
        return second * torch.full((TOKENS,), 2.0)

    Run(answer, run)(torch.ones(TOKENS, requires_grad=True)).sum().backward()
    expect("how often it was run", len(made), 2, case="block(x) = x.exp().exp() * 2")
    wanted = [False, True]
    expect("which of x.exp() and x.exp().exp() are gone when backward is between them", gone, wanted, case="block(x)")


@test(points=2)
def calls_are_independent(answer):
    """Micro-batches in flight together are each recomputed from their own arguments, in any order of backward."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        found = []
        for stack in (Stack(), Stack(answer)):
            xs = [inputs(5 + number) for number in range(3)]
            outs = [stack(x, keys(step)) for step, x in enumerate(xs)]
            for number in order:
                outs[number].square().sum().backward()
            found.append(([x.grad.tolist() for x in xs], stack.gradients()))
        case = f"three micro-batches, whose backward comes in the order {order}"
        expect("how often each block was run, forward and backward", stack.runs(), [6, 6, 6], case=case)
        expect("the gradients of the inputs", found[1][0], found[0][0], case=case)
        expect("the gradients of the weights", found[1][1], found[0][1], case=case)


@test(points=2)
def runs_twice(answer):
    """A block is run once in forward and once in backward; where there are no gradients, once."""
    stack = Stack(answer)
    out = stack(inputs(1), keys(0))
    expect("how often each block was run in forward", stack.runs(), [1, 1, 1])
    out.sum().backward()
    expect("how often each block was run after backward", stack.runs(), [2, 2, 2])
    with torch.no_grad():
        out = stack(inputs(1), keys(0))
    expect("how often each block was run after another forward under no_grad", stack.runs(), [3, 3, 3])
    expect("whether that forward has a graph", out.requires_grad, False)
    with torch.inference_mode():
        stack(inputs(1), keys(0))
    expect("how often each block was run after another forward under inference_mode", stack.runs(), [4, 4, 4])
    for what in ("in eval mode", "from a gradient of zeros"):
        stack = Stack(answer)
        if what == "in eval mode":
            for block in stack.blocks:
                block.eval()
        out = stack(inputs(1), keys(0))
        out.backward(torch.ones_like(out) if what == "in eval mode" else torch.zeros_like(out))
        expect("how often each block was run, forward and backward", stack.runs(), [2, 2, 2], case=f"backward {what}")


@test(points=1)
def backward_twice(answer):
    """Backward may go through the same graph again, and comes to the same."""
    stack, x = Stack(answer), inputs(1)
    out = stack(x, keys(0)).square().sum()
    out.backward(retain_graph=True)
    once, weights = x.grad.clone(), stack.gradients()
    out.backward()
    expect("the gradient of the input after two backwards", x.grad, 2 * once)
    expect("how often each block was run, one forward and two backwards", stack.runs(), [3, 3, 3])
    twice = [(2 * torch.tensor(grad)).tolist() for grad in weights]
    expect("the gradients of the weights after two backwards", stack.gradients(), twice)


@test(points=2)
def weights_behind_a_frozen_embedding(answer):
    """The weights get their gradients if the input needs none, once each, and their hooks see them."""
    for num_frozen in (0, 1):
        case = f"three blocks, the first {num_frozen} of them frozen, and an input that requires no gradient"
        found = []
        for stack in (Stack(), Stack(answer)):
            for block in stack.blocks[:num_frozen]:
                block.requires_grad_(False)
            seen = []
            for block in stack.blocks[num_frozen:]:
                block.down.register_post_accumulate_grad_hook(lambda down, seen=seen: seen.append(down.grad.tolist()))
            x = inputs(1).detach()
            out = stack(x, keys(0))
            expect("whether the output requires a gradient", out.requires_grad, True, case=case)
            out.square().sum().backward()
            expect("the gradient of the input", x.grad, None, case=case)
            found.append((stack.gradients(), seen))
        expect("how often each block was run, forward and backward", stack.runs(), [2, 2, 2], case=case)
        expect("the gradients of the weights", found[1][0], found[0][0], case=case)
        expect("what hooks on the weights were given, in order", found[1][1], found[0][1], case=case)
    for is_frozen in (False, True):
        block = Block(1)
        block.up.requires_grad_(not is_frozen)
        answer.recompute_block(block)
        block(inputs(2), keys(0)).sum().backward()
        expect("whether a frozen weight has a gradient", block.up.grad is None, is_frozen)


class Sum(torch.autograd.Function):
    """The sum over the ranks in forward, as a row-parallel layer has it; nothing in backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@test(points=2, ranks=(1, 2, 3, 4))
def repeats_collectives_in_order(answer, world, network):
    """What a block sends is sent once more in its second run: the same messages on all ranks, block after block."""
    parts = [[draw(100 * rank + number, HIDDEN, 2 + number) for number in range(3)] for rank in range(world.size)]
    mine = [part.clone().requires_grad_() for part in parts[world.rank]]

    def run(weight, x):
        return torch.tanh(Sum.apply(x @ weight, network.group)).sum(dim=-1, keepdim=True) * x

    x = draw(7, TOKENS, HIDDEN)
    for weight in mine:
        x = Run(answer, functools.partial(run, weight))(x)
    sent = len(network.records)
    x.square().sum().backward()
    all_sent = [record.payload_bytes for record in network.records]
    sizes = [8 * TOKENS * (2 + number) for number in range(3)] * (world.size > 1)
    case = "three blocks, each of which calls all_reduce once"
    expect("bytes of each message in forward", all_sent[:sent], sizes, case=case)
    expect("bytes of each message in backward", all_sent[sent:], sizes[::-1], case=case)
    everywhere = all_gather_object(all_sent, network.group)
    expect("messages on all ranks", everywhere, [all_sent] * world.size, case=case)
    x, wholes = draw(7, TOKENS, HIDDEN), [[part.clone().requires_grad_() for part in row] for row in parts]
    for number in range(3):
        x = torch.tanh(sum(x @ row[number] for row in wholes)).sum(dim=-1, keepdim=True) * x
    x.square().sum().backward()
    for number, (weight, whole) in enumerate(zip(mine, wholes[world.rank], strict=True)):
        if weight.grad is None:
            raise Wrong("wrong", f"the gradient of this rank's weight of block {number}", "a tensor", "None")
        if number == 2:  # what comes before it has in `x` a part of the gradient only, as Sum has no sum in backward
            off = 1e-12 * whole.grad.abs().max().item()  # sums of a few float64 in another order
            expect("the gradient of this rank's weight of the last block", weight.grad, whole.grad, tolerance=off)


def wide_block(x, inner):
    """A block that makes three tensors with `inner` numbers per number of `x`, and returns one of the size of x."""
    return torch.tanh(x[..., None] * torch.linspace(0, 1, inner, dtype=x.dtype)).square().mean(-1)


def output_of_blocks(answer, group, x, inner, blocks):
    for _ in range(blocks):
        x = Run(answer, wide_block)(x, inner)
    return x


def blocks_of_one_process(ranks, rank):
    x = ranks[rank]["x"]
    for _ in range(ranks[rank]["blocks"]):
        x = wide_block(x, ranks[rank]["inner"])
    return x


DECLARATION = Declaration(
    inputs={
        "x": Tensors(dtypes=(torch.float64, torch.float32, torch.bfloat16)),
        "inner": Choices((3, 1)),
        "blocks": Choices((2, 1)),
    },
    call=output_of_blocks,
    reference=blocks_of_one_process,
    has_parameters=True,  # the anchor requires gradients
    growth=Growth(
        tuple({"x": {"numel": n}, "inner": {"value": 20 * n}, "blocks": {"value": 8}} for n in (50, 100)),
        peak_bytes=lambda arguments, ranks: PEAK_TENSORS * arguments["inner"] * arguments["x"].nbytes,
        # The output of each block: it is the input of the next one, or the result.
        kept_bytes=lambda arguments, ranks: arguments["blocks"] * arguments["x"].nbytes,
        requires_grad=("x",),
    ),
)


@test(points=1)
def holds_under_every_condition(answer, world, network):
    """Any size and memory layout, float64, float32 and bf16; the memory of eight blocks that make large tensors."""
    check_conditions(DECLARATION, answer, world, network)
