"""Tests of ring_attention: the reference is a softmax over the whole sequence, on one process, in numpy and float64."""

import numpy as np
import torch

from exercises.conditions import Declaration, Drawn, Growth, check_conditions
from exercises.observations import PeakMemory
from exercises.sequence_layouts import LAYOUTS as SEQUENCE_LAYOUTS
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from exercises.traffic import TransferRecorder
from minidist.comm import all_gather_object

BATCH, HEADS, WIDTH = 2, 3, 4
LIMIT = 6  # score matrices of one block that may be in memory at the same time
TOLERANCE = 1e-12  # means of a few dozen values of about 1, in float64 in another order


def shuffled(ranks, each):
    """Rank r has any positions, in any order."""
    return torch.randperm(ranks * each, generator=torch.Generator().manual_seed(each)).view(ranks, each)


LAYOUTS = SEQUENCE_LAYOUTS | {"shuffled": shuffled}


def draw(salt, length, scale=1.0, dtype=torch.float64, width=WIDTH):
    """Return a tensor (BATCH, HEADS, length, width) that is equal on all ranks."""
    generator = torch.Generator().manual_seed(salt)
    return (scale * torch.randn(BATCH, HEADS, length, width, generator=generator, dtype=torch.float64)).to(dtype)


def of_one_process(query, key, value):
    """Return causal attention over the whole sequence, and the log-sum-exp of each query's scores."""
    query, key, value = (x.double().numpy() for x in (query, key, value))
    scores = np.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(query.shape[-1])
    scores[..., ~np.tri(query.shape[2], dtype=bool)] = -np.inf
    largest = scores.max(-1, keepdims=True)
    sums = np.exp(scores - largest).sum(-1, keepdims=True)
    out = np.einsum("bhqk,bhkd->bhqd", np.exp(scores - largest) / sums, value)
    return torch.from_numpy(out), torch.from_numpy((np.log(sums) + largest)[..., 0])


class Case:
    """This rank's tokens of a sequence, and its part of the result of one process."""

    def __init__(self, group, layout, each, scale=1.0, dtype=torch.float64):
        self.positions, self.group = LAYOUTS[layout](group.size, each), group
        own = self.positions[group.rank]
        self.full = [draw(salt, group.size * each, scale, dtype) for salt in (1, 2, 3)]
        self.mine = [x[:, :, own].contiguous() for x in self.full]
        self.out, self.lse = (x[:, :, own] for x in of_one_process(*self.full))
        self.name = f"{group.size} ranks, {layout} layout, {each} tokens each"

    def check(self, answer, tolerance=TOLERANCE):
        passed, positions = [x.clone() for x in self.mine], self.positions.clone()
        out, lse = answer.ring_forward(*passed, positions, self.group)
        expect("shape and dtype of the output", [list(out.shape), str(out.dtype)],
               [list(self.mine[0].shape), str(self.mine[0].dtype)], case=self.name)  # fmt: skip
        expect("the output", out.double(), self.out, tolerance=tolerance, case=self.name)
        expect("the log-sum-exp", lse.double(), self.lse, tolerance=10 * tolerance, case=self.name)
        expect("query, key and value afterwards", passed, self.mine, case=self.name)
        expect("positions afterwards", positions, self.positions, case=self.name)
        return out, lse


@test(points=5, ranks=(1, 2, 3, 4))
def attention_of_one_process(answer, world, network):
    """Output and log-sum-exp of this rank's queries are those of one process, for any positions of the tokens."""
    for each in (1, 2, 5, 6):
        for layout in LAYOUTS:
            if layout != "zigzag" or each % 2 == 0:
                Case(network.group, layout, each).check(answer)
    if world.size == 4:
        Case(network.divided_group, "zigzag", 4).check(answer)
        Case(network.divided_group, "contiguous", 3).check(answer)


@test(points=2)
def merges_blocks_in_any_order(answer):
    """`merge_block` gives the attention over all blocks so far, `causal_scores` the scores of any keys and queries."""
    query, key, value = (draw(salt, 12) for salt in (1, 2, 3))
    scores = query @ key.mT / WIDTH**0.5
    scores[:, :, 4:8, 5:9] = -torch.inf
    for blocks in (((0, 12),), ((0, 5), (5, 9), (9, 12)), ((9, 12), (5, 9), (0, 5)), ((0, 1), (5, 9), (1, 5))):
        out, lse, seen = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf), []
        for begin, end in blocks:
            passed = out, lse, scores[..., begin:end].clone(), value[:, :, begin:end].clone()
            copies = [x.clone() for x in passed]
            out, lse = answer.merge_block(*passed)
            expect("the arguments afterwards", list(passed), copies)
            seen += range(begin, end)
            case = f"keys {seen}, of which queries 4 to 7 do not see 5 to 8"
            wanted = scores[..., seen].softmax(-1) @ value[:, :, seen]
            expect("the output", out, wanted, tolerance=TOLERANCE, case=case)
            expect("the log-sum-exp", lse, scores[..., seen].logsumexp(-1), tolerance=TOLERANCE, case=case)
    for number, dtype in ((3, torch.float64), (1, torch.float64), (7, torch.float32)):
        query, key = draw(4, 5, dtype=dtype), draw(5, number, dtype=dtype)
        positions = torch.tensor([7, 2, 9, 0, 4]), torch.tensor([4, 8, 1, 7, 0, 3, 9])[:number]
        passed = [x.clone() for x in (query, key, *positions)]
        scores, case = (
            answer.causal_scores(*passed),
            f"queries at {positions[0].tolist()}, keys at {positions[1].tolist()}",
        )
        expect("the arguments of causal_scores afterwards", passed, [query, key, *positions], case=case)
        wanted = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) / WIDTH**0.5
        wanted[..., torch.tensor([[k > q for k in passed[3].tolist()] for q in passed[2].tolist()])] = -torch.inf
        expect("the dtype of the scores", str(scores.dtype), str(dtype), case=case)
        hidden = wanted == -torch.inf
        expect("scores that are minus infinity", scores == -torch.inf, hidden, case=case)
        got, wanted = (x.double().masked_fill(hidden, 0) for x in (scores, wanted))
        expect("the other scores", got, wanted, tolerance=1e-5 if dtype == torch.float32 else TOLERANCE, case=case)


@test(points=4, ranks=(1, 2, 3))
def large_scores(answer, world, network):
    """Scores in the thousands neither overflow nor lose the smaller terms, whichever block has the largest."""
    for layout in ("zigzag", "in turn"):
        Case(network.group, layout, 4, scale=60.0).check(
            answer, tolerance=1e-9
        )  # lse of 1e4 has 12 digits after the point
    case = Case(network.group, "contiguous", 4)
    query, key, value = (torch.full_like(x, number) for x, number in zip(case.mine, (1.0, -6000.0, 1.0), strict=True))
    out, lse = answer.ring_forward(query, key, value + world.rank, case.positions, network.group)
    last = case.positions[world.rank].double() + 1  # the number of keys that a query sees; all scores are -12000
    expect("the log-sum-exp of scores of -12000", lse[0, 0], (last.log() - 12000).tolist(), tolerance=1e-9)
    sums = torch.cumsum(torch.arange(4 * world.size) // 4 + 1.0, 0)[case.positions[world.rank]]
    expect("the mean of the values", out[0, 0, :, 0], (sums / last).tolist(), tolerance=1e-11)


@test(points=2, ranks=(1, 2, 3, 4))
def sends_to_the_next_rank(answer, world, network):
    """`send_to_next` returns what the previous rank sent, of any shape and dtype; it sends nothing if it need not."""
    for shape, dtype in (
        ((3,), torch.float64),
        ((2, 5, 1), torch.int64),
        ((2, 3), torch.bfloat16),
        ((0,), torch.float32),
        ((2, 0, 3), torch.float64),
        ((), torch.float64),
        ((1, 1), torch.int32),
    ):
        sent = torch.full(shape, world.rank + 1).to(dtype)
        with TransferRecorder(network) as recorder:
            got = answer.send_to_next(sent, network.group)
        wanted = torch.full(shape, (world.rank - 1) % world.size + 1).to(dtype)
        expect(f"what rank {world.rank} receives", got, wanted, case=f"{dtype} of shape {shape}")
        expect("dtype", str(got.dtype), str(dtype))
        expect("the tensor that was sent, afterwards", sent, torch.full(shape, world.rank + 1).to(dtype))
        if world.size == 1 or not sent.numel():
            case = f"{dtype} of shape {shape} on {world.size} ranks"
            expect("operations that send_to_next calls", [name for name, *_ in recorder.transfers], [], case=case)


@test(points=4, ranks=(2, 3, 4))
def a_ring_of_blocks(answer, world, network):
    """Keys and values go to one neighbour, size - 1 times; nothing else is sent, and the queries stay."""
    for each in (2, 6):
        case = Case(network.group, "contiguous", each)
        recorder = TransferRecorder(network)
        with recorder:
            answer.ring_forward(*case.mine, case.positions, network.group)
        rounds, block = world.size - 1, 2 * BATCH * HEADS * each * WIDTH
        expect(
            "elements sent: keys and values, size - 1 times", recorder.elements_sent(), rounds * block, case=case.name
        )
        peers = {"send": sorted(set(recorder.peers("send"))), "recv": sorted(set(recorder.peers("recv")))}
        after, before = [(world.rank + 1) % world.size], [(world.rank - 1) % world.size]
        if peers not in ({"send": after, "recv": before}, {"send": before, "recv": after}):
            wanted = f"ranks {after} and {before}, or the other way round"
            raise Wrong("wrong", "ranks that this one sends to and receives from", wanted, str(peers), case=case.name)


@test(points=3, ranks=(2, 4))
def memory_of_one_block(answer, world, network):
    """A rank holds a few blocks of keys and values, and never the scores of the whole sequence."""
    each = 192
    case = Case(network.group, "contiguous", each)
    passed = [x.clone() for x in case.mine]
    with PeakMemory() as memory:
        result = answer.ring_forward(*passed, case.positions, network.group)
    if result is None:
        raise Wrong("type", "the function returned None: is a `return` missing?", "a tuple of two tensors", "None")
    scores = BATCH * HEADS * each * each * 8
    what = f"peak memory, in score matrices of one block ({scores // 1000} kB)"
    peaks = all_gather_object(memory.peak_bytes, network.group)
    if max(peaks) > LIMIT * scores + 40 * case.mine[0].nbytes:
        got = f"{max(peaks) / scores:.1f} on {world.size} ranks"
        raise Wrong("wrong", what, f"at most {LIMIT}, on any number of ranks", got, case=case.name)


# The draws of every argument: layout, tokens per rank, dtype, and whether tensors are views of longer ones.
DRAWS = (
    ("contiguous", 3, torch.float64, False),
    ("in turn", 1, torch.float64, False),
    ("zigzag", 4, torch.float64, False),
    ("contiguous", 4, torch.float32, False),
    ("in turn", 3, torch.float64, True),
)
# The draws between which memory is compared: wide heads, so that blocks of keys count and not their scores.
GROWING_WIDTH = 256
GROWING = (("contiguous", 4, torch.float64, False), ("contiguous", 8, torch.float64, False))


def own_tokens(salt, number, rank, ranks):
    """Return a rank's tokens of the query, key or value of a draw."""
    layout, each, dtype, is_view = (*DRAWS, *GROWING)[number]
    width = WIDTH if number < len(DRAWS) else GROWING_WIDTH
    x = draw(salt, ranks * each, dtype=dtype, width=width)[:, :, LAYOUTS[layout](ranks, each)[rank]]
    return x.mT.contiguous().mT if is_view else x.contiguous()


def attention_reference(ranks, rank):
    layout, each, dtype, _ = DRAWS[ranks[0]["draw"]]
    positions = LAYOUTS[layout](len(ranks), each)
    full = [torch.empty_like(draw(0, len(ranks) * each)) for _ in "qkv"]
    for x, name in zip(full, ("query", "key", "value"), strict=True):
        for owner, arguments in enumerate(ranks):
            x[:, :, positions[owner]] = arguments[name].double()
    return tuple(x[:, :, positions[rank]].to(dtype) for x in of_one_process(*full))


def call_ring(answer, group, query, key, value, draw):
    layout, each, _, _ = (*DRAWS, *GROWING)[draw]
    return answer.ring_forward(query, key, value, LAYOUTS[layout](group.size, each), group)


def most_memory(arguments, ranks):
    """Return the bytes of 13 tensors like the queries; right answers have 6 to 9 of them, on any number of ranks."""
    return 13 * arguments["query"].nbytes


def declarations():
    """Return a declaration for each draw, which selects all arguments together."""
    names = ("query", "key", "value", "draw")
    sizes = [{name: {"draw": len(DRAWS) + number} for name in names} for number in range(len(GROWING))]
    for number in range(len(DRAWS)):
        inputs = {
            name: Drawn(lambda rank, ranks, other, n=number, s=salt: own_tokens(s, other or n, rank, ranks))
            for salt, name in enumerate(names[:3], 1)
        }
        yield Declaration(
            inputs={**inputs, "draw": Drawn(lambda rank, ranks, other, n=number: other or n)},
            call=call_ring,
            reference=attention_reference,
            roundings=60,  # sums over at most 28 keys, exponentials and merges
            # Keys and values, size - 1 times by every rank.
            max_bytes=lambda ranks: len(ranks) * (len(ranks) - 1) * 2 * ranks[0]["key"].nbytes,
            aliases=names[:3],
            growth=None
            if number
            else Growth(sizes, most_memory, kept_bytes=lambda own, ranks: 2 * own["query"].nbytes),
        )


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """In float64 and float32, on 1 to 7 ranks and in groups of only some ranks; calls do not influence each other."""
    for declaration in declarations():
        check_conditions(declaration, answer, world, network)
