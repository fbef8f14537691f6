"""Tests of gather_and_free: a model of whole numbers, whose products look whether their row is there."""

import itertools

import torch
from torch import nn

from exercises.expected_shards import shard_elements
from exercises.observations import LiveTensorMemory, timeline
from exercises.testing import Wrong, expect, test
from exercises.weight_use_model import LAYERS, WeightUseModel
from minidist.precision.dtypes import PrecisionDtypes
from minidist.zero.gather import Block
from minidist.zero.plan import ROOT, lay_out_flat

# Rows by block. They differ in length also when padded for 2 or 3 ranks, so that a message tells whose it is.
ROWS = {
    ROOT: {"embed": (2, 3), "head": (7, 1)},
    0: {"layers.0.weight": (3, 5), "layers.0.bias": (5,)},
    1: {"layers.1.weight": (5, 6), "layers.1.bias": (6,)},
    2: {"layers.2.weight": (6, 7), "layers.2.bias": (7,)},
}
FP64 = PrecisionDtypes(*[torch.float64] * 5)
NAMES = {ROOT: "the rest", **{index: f"block {index}" for index in range(LAYERS)}}
WAYS = list(itertools.product((True, False), repeat=2))


def start(name, shape, rank):
    """Where a parameter starts on a rank: nowhere the same, small whole numbers."""
    numbers = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    return (numbers * (3 + rank) + len(name)) % 5 - 1


def gathered(size):
    """What the parameters are when gathered: each element is that of the rank in whose shard it lies."""
    found = {}
    for row in ROWS.values():
        found |= {name: torch.zeros(shape, dtype=torch.float64) for name, shape in row.items()}
        sizes = {name: found[name].numel() for name in row}
        for rank, shard in enumerate(shard_elements(sizes, size)):
            for name, place in filter(None, shard):
                found[name].view(-1)[place] = start(name, row[name], rank).view(-1)[place]
    return found


class Run:
    """A model whose rows are the learner's flat_params, gathered and freed by the learner's blocks."""

    def __init__(self, answer, world, network, keep=True, prefetch=True):
        values = {name: start(name, shape, world.rank) for row in ROWS.values() for name, shape in row.items()}
        self.model = WeightUseModel({name: value.clone() for name, value in values.items()})
        self.parameters, self.flat_params = dict(self.model.named_parameters()), {}
        for index, row in ROWS.items():
            layout = lay_out_flat({name: values[name].numel() for name in row}, world.size)
            held = {name: self.parameters[name] for name in row}
            self.flat_params[index] = answer.ShardedFlatParam(held, values, layout, network.group, FP64)
        root = Block(self.model, [self.flat_params[ROOT]], ROOT)
        blocks = [Block(self.model.layers[index], [self.flat_params[index]], index) for index in range(LAYERS)]
        self.blocks = answer.BlockGatherer(self.model, root, blocks, LAYERS, keep, prefetch)
        self.network, self.seen = network, []
        self.model.on_weight_use(self._look)

    def there(self):
        """The rows that have memory."""
        return [
            index for index, flat_param in self.flat_params.items() if flat_param.full_buffer.untyped_storage().nbytes()
        ]

    def _look(self, kind, index):
        if index not in self.there():
            raise Wrong("wrong", f"the {kind} of {NAMES[index]} begins, and its row has no memory", case="stage 3")
        self.seen.append((kind, index, self.there()))
        self.network.event(f"{kind} {index}")

    def numel_of(self, index):
        return self.flat_params[index].full_buffer.numel()


def data(rank):
    """(4, 2), other numbers on every rank."""
    return torch.arange(8.0, dtype=torch.float64).reshape(4, 2) - rank


def named(rows):
    return [NAMES[index] for index in sorted(rows)]


@test(points=3, ranks=(1, 2, 3))
def gather_and_release_one(answer, world, network):
    """A row has memory from launch_gather() to release(), and then all ranks' parts; the own part always stays."""
    row, group = ROWS[1], network.group
    values = {name: start(name, shape, world.rank) for name, shape in row.items()}
    layout = lay_out_flat({name: value.numel() for name, value in values.items()}, world.size)
    shard_bytes, row_bytes = 8 * layout.shard_numel, 8 * layout.numel
    with LiveTensorMemory() as memory:
        parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        flat_param = answer.ShardedFlatParam(parameters, values, layout, group, FP64)
        expect("bytes of the row at the start", flat_param.full_buffer.untyped_storage().nbytes(), 0)
        expect("bytes of what stays", flat_param.shard.untyped_storage().nbytes(), shard_bytes)
        expect("bytes in all: this rank's shard", memory.nbytes(), shard_bytes)
        for step in range(2):
            flat_param.launch_gather()
            flat_param.launch_gather()  # it is in flight already
            flat_param.wait_gather()
            expect("bytes in all: the shard and the row", memory.nbytes(), shard_bytes + row_bytes)
            for name, parameter in parameters.items():
                expect(f"{name}, gathered", parameter.detach(), gathered(world.size)[name] + step)
            flat_param.reshard()
            expect("bytes of the row when it was released", flat_param.full_buffer.untyped_storage().nbytes(), 0)
            expect("bytes in all when it was released", memory.nbytes(), shard_bytes)
            flat_param.shard += 1  # an update
    flat_param.launch_gather()
    flat_param.reshard()  # nobody has waited for it
    flat_param.reshard()
    sent = [[record.name, record.payload_bytes // 8] for record in network.records]
    expect("what is sent: (operation, elements)", sent, [["all_gather", layout.numel]] * 3 if world.size > 1 else [])
    late = [record for record in network.records if record.waited is None]
    expect("gathers that nobody waited for before their memory was given back", len(late), 0)


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, network):
    """Loss and gradients are those of the whole model on one process, whatever is kept or prefetched."""
    alone = WeightUseModel(gathered(world.size))
    (loss,) = alone(data(world.rank))
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for keep, prefetch in WAYS:
        run, case = Run(answer, world, network, keep, prefetch), f"keep={keep}, prefetch={prefetch}"
        for micro_batch in (1, 2):
            (got,) = run.model(data(world.rank))
            got.backward()
            run.blocks.reshard_all()
            expect("the loss", got.item(), loss.item(), case=case)
            for name, grad in wanted.items():
                what = f"the gradient of {name} after {micro_batch} micro-batches"
                expect(what, run.parameters[name].grad, micro_batch * grad, case=case)


@test(points=4, ranks=(2,))
def unsharded_only_while_needed(answer, world, network):
    """While a block computes, its row has memory, so has the rest's and, with prefetch, the next; then what is kept."""
    for keep, prefetch in WAYS:
        run, case = Run(answer, world, network, keep, prefetch), f"keep={keep}, prefetch={prefetch}"
        (loss,) = run.model(data(world.rank))
        between = run.there()
        loss.backward()
        for kind, index, there in run.seen:
            if index != ROOT:
                ahead = index + (1 if kind == "forward" else -1)
                wanted = {ROOT, index, ahead} if prefetch and 0 <= ahead < LAYERS else {ROOT, index}
                what = f"rows that have memory when the {kind} of {NAMES[index]} begins"
                expect(what, named(there), named(wanted), case=case)
        what = "rows that have memory after forward, before backward"
        expect(what, named(between), named({ROOT, LAYERS - 1} if keep else ()), case=case)
        run.blocks.reshard_all()
        expect("rows that have memory when all is over", named(run.there()), [], case=case)
        with torch.no_grad():
            run.model(data(world.rank))
        expect("rows that have memory after a pass without gradients", named(run.there()), [], case=case)


@test(points=3, ranks=(2, 3))
def at_most_two_gathers(answer, world, network):
    """A row is gathered once for forward and once for backward, what stays only once; nothing else is sent."""
    for keep, prefetch in WAYS:
        run, before = Run(answer, world, network, keep, prefetch), len(network.records)
        (loss,) = run.model(data(world.rank))
        loss.backward()
        run.blocks.reshard_all()
        with torch.no_grad():
            run.model(data(world.rank))
        sent = [[record.name, record.payload_bytes // 8] for record in network.records[before:]]
        for index in ROWS:
            times = 2 if keep and index in (ROOT, LAYERS - 1) else 3
            got = sent.count(["all_gather", run.numel_of(index)])
            what = f"gathers of {NAMES[index]} in a pass forward, one backward and one without gradients"
            expect(what, got, times, case=f"keep={keep}, prefetch={prefetch}")
        total = 3 * len(ROWS) - 2 * keep
        expect("messages in all", len(sent), total, case=f"keep={keep}, prefetch={prefetch}")


@test(points=3, ranks=(2,))
def prefetch_overlaps_with_compute(answer, world, network):
    """With prefetch a block's gather is launched before the block ahead of it computes, and waited for after."""
    run = Run(answer, world, network)
    (loss,) = run.model(data(world.rank))
    network.event("turn")
    loss.backward()
    happened, numbers = timeline(network), {run.numel_of(index): index for index in ROWS}
    of = [numbers[record.payload_bytes // 8] for record in network.records]  # whose row each message is
    turn = happened.index("turn")
    first = happened.index(f"launch {of.index(0)}")
    in_time("the gather of block 0 is launched", first < happened.index(f"forward {ROOT}"), "the embedding computes")
    for kind, ahead in (("forward", 1), ("backward", -1)):
        for index in range(LAYERS):
            if not 0 <= index + ahead < LAYERS or (kind, index + ahead) == ("backward", LAYERS - 1):
                continue
            number = [n for n, whose in enumerate(of) if whose == index + ahead][kind == "backward"]
            begins = happened.index(f"{kind} {index}")
            launched, waited = (happened.index(f"{what} {number}") for what in ("launch", "wait"))
            what, computes = f"in {kind}, the gather of {NAMES[index + ahead]} is", f"{NAMES[index]} begins"
            in_time(f"{what} launched", launched < begins, computes)
            in_time(f"{what} waited for", waited > begins, computes, "after")
            if kind == "backward":
                in_time(f"{what} launched", launched > turn, "forward is over", "after")


def in_time(what, right, event, when="before"):
    """Something must come before, or after, an event."""
    if not right:
        other = {"before": "after", "after": "before"}[when]
        raise Wrong("wrong", what, f"{when} {event}", f"{other} {event}", case="prefetch=True")


@test(points=2, ranks=(2,))
def calls_on_block_done(answer, world, network):
    """`on_block_done` is called with a block's flat parameters when its backward is over, before that of the next."""
    for prefetch in (True, False):
        run, calls, case = Run(answer, world, network, prefetch=prefetch), [], f"prefetch={prefetch}"
        run.blocks.on_block_done = lambda flat_params, run=run, calls=calls: calls.append(
            (list(flat_params), len(run.seen), run.there())
        )
        (loss,) = run.model(data(world.rank))
        loss.backward()
        order = [[kind, index] for kind, index, _ in run.seen]
        expect(
            "how often `on_block_done` was called", len(calls), LAYERS - 1, case=case
        )  # the first block's end is that of all
        for (flat_params, seen, there), index in zip(calls, range(LAYERS - 1, 0, -1), strict=True):
            what = f"whether `on_block_done` was told the flat_params of {NAMES[index]}"
            expect(what, flat_params == [run.flat_params[index]], True, case=case)
            what = f"what computed last when `on_block_done` was called for {NAMES[index]}"
            expect(what, order[seen - 1], ["backward", index], case=case)
            wanted = named({ROOT, index - 1} if prefetch else {ROOT})
            what = f"rows that have memory when `on_block_done` was called for {NAMES[index]}"
            expect(what, named(there), wanted, case=case)


@test(points=1, ranks=(2,))
def forward_over_some_layers(answer, world, network):
    """A pass gathers the layers that it goes through and no other, and the rest only at the ends of the model."""
    run = Run(answer, world, network)
    hidden = run.model(data(world.rank), layers=range(2))
    seen = {index for _, _, there in run.seen for index in there}
    expect("rows that had memory in layers 0 and 1", named(seen), named({ROOT, 0, 1}))
    expect("rows that have memory after them", named(run.there()), [])
    run.seen.clear()
    (loss,) = run.model(hidden.detach().requires_grad_(), layers=range(2, 3))
    loss.backward()
    seen = {index for _, _, there in run.seen for index in there}
    expect("rows that had memory in layer 2 and the head", named(seen), named({ROOT, 2}))
    run.blocks.reshard_all()
    run.seen.clear()
    run.model(torch.ones(4, 5, dtype=torch.float64), layers=range(1, 2))
    expect("rows that had memory in layer 1", named(run.seen[0][2]), named({1}))
