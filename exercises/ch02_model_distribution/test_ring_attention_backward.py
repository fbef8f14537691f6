"""Tests of ring_attention_backward: the reference is autograd through a softmax over the whole sequence, in float64."""

from functools import cache

import torch

from exercises.conditions import Declaration, Drawn, Growth, check_conditions
from exercises.observations import PeakMemory
from exercises.sequence_layouts import LAYOUTS as SEQUENCE_LAYOUTS
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from exercises.traffic import TransferRecorder
from minidist.comm import all_gather_object

BATCH, HEADS, WIDTH = 2, 3, 4
SCORES_LIMIT = 9  # score matrices of one block that may be in memory at the same time
BLOCKS_LIMIT = 26  # tensors of the size of a rank's keys that may be in memory at the same time
TOLERANCE = 1e-12  # sums of a few dozen products of numbers of about 1, in float64 in another order
NAMES = ("grad", "query", "key", "value", "out", "lse")


def shuffled(ranks, each):
    """Rank r has any positions, in any order."""
    return torch.randperm(ranks * each, generator=torch.Generator().manual_seed(each)).view(ranks, each)


LAYOUTS = SEQUENCE_LAYOUTS | {"shuffled": shuffled}


def draw(salt, length, dtype=torch.float64, width=WIDTH):
    """Return a tensor (BATCH, HEADS, length, width) that is equal on all ranks."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(BATCH, HEADS, length, width, generator=generator, dtype=torch.float64).to(dtype)


def of_one_process(grad, query, key, value):
    """Return output and log-sum-exp of causal attention over the whole sequence, and the gradients of its inputs."""
    grad, *inputs = (x.double() for x in (grad, query, key, value))
    with torch.enable_grad():
        query, key, value = (x.detach().requires_grad_() for x in inputs)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        out = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)
        gradients = torch.autograd.grad(out, (query, key, value), grad)
    return out.detach(), scores.logsumexp(-1).detach(), gradients


class Case:
    """This rank's tokens of a sequence, and its part of the gradients of one process.

    change: (query, key) -> the query and key to use in place of the drawn ones.
    """

    def __init__(self, group, layout, each, width=WIDTH, change=lambda query, key: (query, key)):
        self.positions, self.group = LAYOUTS[layout](group.size, each), group
        own = self.positions[group.rank]
        query, key, value, grad = (draw(salt, group.size * each, width=width) for salt in (1, 2, 3, 4))
        query, key = change(query, key)
        out, lse, gradients = of_one_process(grad, query, key, value)
        self.mine = [x[:, :, own].contiguous() for x in (grad, query, key, value, out, lse)]
        self.gradients = [x[:, :, own] for x in gradients]
        self.name = f"{group.size} ranks, {layout} layout, {each} tokens each"

    def call(self, answer):
        result = answer.ring_backward(*self.mine, self.positions, self.group)
        if not isinstance(result, tuple) or len(result) != 3:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise Wrong("type", "the result", "the gradients of query, key and value: three tensors", got)
        return result

    def compare(self, result, tolerance):
        for name, got, expected in zip(("query", "key", "value"), result, self.gradients, strict=True):
            expect(f"shape of the gradient of {name}", list(got.shape), list(expected.shape), case=self.name)
            expect(f"the gradient of {name}", got, expected, tolerance=tolerance, case=self.name)
            expect(f"whether the gradient of {name} requires a gradient", got.requires_grad, False, case=self.name)

    def check(self, answer, tolerance=TOLERANCE):
        before, positions = [x.clone() for x in self.mine], self.positions.clone()
        self.compare(self.call(answer), tolerance)
        expect("positions afterwards", self.positions, positions, case=self.name)
        for name, after, passed in zip(NAMES, self.mine, before, strict=True):
            expect(f"{name} afterwards", after, passed, case=self.name)


@test(points=6, ranks=(1, 2, 3, 4))
def gradients_of_one_process(answer, world, network):
    """Gradients of this rank's query, key and value are those of one process, for any positions of the tokens."""
    for layout, each in (
        ("contiguous", 1),
        ("contiguous", 5),
        ("zigzag", 2),
        ("zigzag", 4),
        ("in turn", 3),
        ("shuffled", 4),
    ):
        Case(network.group, layout, each).check(answer)
    if world.size == 4:
        Case(network.divided_group, "zigzag", 4).check(answer)
        Case(network.divided_group, "contiguous", 3).check(answer)


@test(points=3, ranks=(1, 2, 3))
def large_scores(answer, world, network):
    """Scores in the thousands, of either sign, neither overflow nor vanish."""
    changes = (
        lambda query, key: (60 * query, 60 * key),
        lambda query, key: (torch.ones_like(query), key - 1000),
        lambda query, key: (torch.ones_like(query), key + 1000),
    )
    for layout in ("zigzag", "in turn"):
        for change in changes:
            Case(network.group, layout, 4, change=change).check(answer, tolerance=1e-8)  # gradients of up to 1e3


@test(points=4, ranks=(2, 3, 4))
def a_ring_of_blocks_and_gradients(answer, world, network):
    """A rank sends at most size times its keys, values and their gradients, and only to its neighbours in the ring."""
    neighbours = {(world.rank + 1) % world.size, (world.rank - 1) % world.size}
    for each in (2, 6):
        case = Case(network.group, "contiguous", each)
        recorder = TransferRecorder(network)
        with recorder:
            case.call(answer)
        sent, most = recorder.elements_sent(), world.size * 4 * BATCH * HEADS * each * WIDTH
        if sent > most:
            raise Wrong("wrong", "elements that this rank sends", f"at most {most}", str(sent), case=case.name)
        peers = set(recorder.peers("send")) | set(recorder.peers("recv"))
        if not peers <= neighbours:
            what = "ranks that this one sends to or receives from"
            raise Wrong("wrong", what, f"{sorted(neighbours)} at most", str(sorted(peers)), case=case.name)


def peak_memory(answer, group, each, width):
    """Return the largest peak of the ranks' memory during a call, in bytes."""
    case = Case(group, "contiguous", each, width)
    with PeakMemory() as memory:
        result = case.call(answer)
    case.compare(result, tolerance=1e-11)  # sums of up to a thousand products
    return max(all_gather_object(memory.peak_bytes, group))


@test(points=3, ranks=(2, 4, 6))
def memory_of_one_block(answer, world, network):
    """A rank holds a few blocks of keys and values and of scores, however many ranks there are."""
    for each, width, unit, what, limit, growth in (
        (96, WIDTH, 96 * 96, "score matrices of one block", SCORES_LIMIT, 1),
        (4, 1024, 4 * 1024, "tensors of the size of a rank's keys", BLOCKS_LIMIT, 2),
    ):
        unit *= BATCH * HEADS * 8
        peak = peak_memory(answer, network.group, each, width)
        what = f"peak memory, in {what} ({unit // 1000} kB)"
        if peak > limit * unit:
            raise Wrong("wrong", what, f"at most {limit}", f"{peak / unit:.1f} on {world.size} ranks")
        if world.size == 6:  # right answers grow by 0 or 1 from 3 to 6 ranks, and one tensor for each rank by 3
            fewer = peak_memory(answer, network.divided_group, each, width)
            if peak > fewer + growth * unit:
                raise Wrong("wrong", what, f"as on 3 ranks: {fewer / unit:.1f}", f"{peak / unit:.1f} on 6 ranks")


# The draws of every argument: layout, tokens per rank, dtype, whether tensors are views of longer ones, head dimension.
DRAWS = (
    ("in turn", 1, torch.float64, False, WIDTH),
    ("zigzag", 4, torch.float64, False, WIDTH),
    ("contiguous", 4, torch.float32, False, WIDTH),
    ("in turn", 3, torch.float64, True, WIDTH),
)
# The draws between which memory is compared: wide heads, where blocks of keys count, and many tokens, where scores do.
GROWING = (
    (("contiguous", 4, torch.float64, False, 256), ("contiguous", 8, torch.float64, False, 256)),
    (("contiguous", 32, torch.float64, False, WIDTH), ("contiguous", 64, torch.float64, False, WIDTH)),
)
ALL_DRAWS = (*DRAWS, *GROWING[0], *GROWING[1])


@cache
def full_sequence(number, ranks):
    """Return the arguments of a draw for the whole sequence, by name, and the gradients of one process."""
    _, each, dtype, _, width = ALL_DRAWS[number]
    inputs = [draw(salt, ranks * each, dtype=dtype, width=width) for salt in (4, 1, 2, 3)]
    out, lse, gradients = of_one_process(*inputs)
    return dict(zip(NAMES, (*inputs, out.to(dtype), lse.to(dtype)), strict=True)), gradients


def own_tokens(name, number, rank, ranks):
    """Return a rank's part of one argument of a draw."""
    layout, each, _, is_view, _ = ALL_DRAWS[number]
    arguments, _ = full_sequence(number, ranks)
    x = arguments[name][:, :, LAYOUTS[layout](ranks, each)[rank]]
    return x.mT.contiguous().mT if is_view else x.contiguous()


def gradients_reference(ranks, rank):
    number = ranks[0]["draw"]
    layout, each, dtype, _, _ = ALL_DRAWS[number]
    _, gradients = full_sequence(number, len(ranks))
    return tuple(x[:, :, LAYOUTS[layout](len(ranks), each)[rank]].to(dtype) for x in gradients)


def call_backward(answer, group, draw, **arguments):
    layout, each, *_ = ALL_DRAWS[draw]
    return answer.ring_backward(*arguments.values(), LAYOUTS[layout](group.size, each), group)


def most_memory(arguments, ranks):
    """Return the bytes of so many score matrices of one block, and so many tensors like the keys."""
    query = arguments["query"]
    scores = query[..., 0].numel() * query.shape[2] * query.element_size()
    return SCORES_LIMIT * scores + BLOCKS_LIMIT * query.nbytes


def declarations():
    """Return a declaration for each draw, which selects all arguments together."""
    names = (*NAMES, "draw")
    for number in range(len(DRAWS)):
        inputs = {
            name: Drawn(lambda rank, ranks, other, n=number, name=name: own_tokens(name, other or n, rank, ranks))
            for name in NAMES
        }
        growth = None
        if number < len(GROWING):
            sizes = [{name: {"draw": ALL_DRAWS.index(each)} for name in names} for each in GROWING[number]]
            growth = Growth(sizes, most_memory, lambda arguments, ranks: 5 * arguments["query"].nbytes)
        yield Declaration(
            inputs={**inputs, "draw": Drawn(lambda rank, ranks, other, n=number: other or n)},
            call=call_backward,
            reference=gradients_reference,
            roundings=100,  # sums over at most 28 keys or queries of differences of products, and exponentials
            # Keys, values and their gradients, size times by every rank.
            max_bytes=lambda ranks: len(ranks) ** 2 * 4 * ranks[0]["key"].nbytes,
            growth=growth,
        )


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """In float64 and float32, in groups of only some ranks; memory of a few blocks, however many ranks there are."""
    for declaration in declarations():
        check_conditions(declaration, answer, world, network)
