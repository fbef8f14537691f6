"""Tests of central_server: whole numbers, so that sums are exact in any order; only the server has valid parameters."""

import math
from dataclasses import replace

import torch

from exercises.conditions import Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_gather_object

SIZES = (7, 2, 0)  # no multiples of 3 or 4; with two elements or none, some ranks of four have an empty shard


def gradient(rank, step, numel):
    """A rank's gradient: different on every rank and in every step."""
    return torch.arange(float(numel)) * (rank + 1) + 10.0 * step - rank


class Update:
    """SGD with momentum 0.5 and rate 2; records the values of its calls."""

    def __init__(self):
        self.calls, self.velocity = [], 0.0

    def __call__(self, parameters, total):
        self.calls.append((parameters.tolist(), total.tolist()))
        self.velocity = 0.5 * self.velocity + total
        parameters -= 2 * self.velocity


def by_hand(size, numel, steps=2):
    """(parameters, summed gradient) before each update, and the parameters after the last one."""
    parameters, update, calls = torch.arange(float(numel)), Update(), []
    for step in range(steps):
        update(parameters, sum(gradient(rank, step, numel) for rank in range(size)))
    return update.calls, parameters


def train_central(answer, world, network, server, numel=7):
    """Two steps; the parameters of all ranks but the server are NaN before the first one."""
    update, parameters = Update(), torch.full((numel,), math.nan)
    if world.rank == server:
        parameters = torch.arange(float(numel))
    for step in range(2):
        answer.central_step(parameters, gradient(world.rank, step, numel), update, network.group, server)
    return parameters, update


def train_sharded(answer, world, network, numel):
    """Two steps, from equal parameters."""
    update, parameters = Update(), torch.arange(float(numel))
    for step in range(2):
        answer.sharded_step(parameters, gradient(world.rank, step, numel), update, network.group)
    return parameters, update


def limits(size, numel):
    """The first element of each shard, and the end of the last one."""
    lengths = [numel // size + (rank < numel % size) for rank in range(size)]
    return [sum(lengths[:rank]) for rank in range(size + 1)]


def messages(network, before):
    """(sends, receives) of this rank, each a list of (peer, bytes) without empty messages."""
    records = [r for r in network.records[before:] if r.name in ("send", "recv") and r.payload_bytes]
    return [[(r.peer, r.payload_bytes) for r in records if r.name == name] for name in ("send", "recv")]


def other_operations(network, before):
    """The names of this rank's operations besides sends and receives."""
    return sorted({record.name for record in network.records[before:]} - {"send", "recv"})


@test(points=3, ranks=(1, 2, 3, 4))
def server_updates_by_the_sum(answer, world, network):
    """All ranks end with the server's parameters, updated with the sum of all gradients."""
    for server in range(world.size):
        parameters, _ = train_central(answer, world, network, server)
        expect("the parameters after two steps", parameters, by_hand(world.size, 7)[1], case=f"rank {server} serves")


@test(points=2, ranks=(3,))
def only_the_server_updates(answer, world, network):
    """`update` is called once per step, on the server only, with its parameters and the summed gradient."""
    for server in range(world.size):
        for numel in SIZES:
            _, update = train_central(answer, world, network, server, numel)
            calls = all_gather_object(update.calls, network.group)
            case = f"central_step, {numel} elements, rank {server} serves"
            counts = [2 * (rank == server) for rank in range(world.size)]
            expect("calls of update on each rank in two steps", [len(each) for each in calls], counts, case=case)
            expect("(parameters, gradient) of each call", calls[server], by_hand(3, numel)[0], case=case)


@test(points=3, ranks=(2, 3))
def one_message_each_way(answer, world, network):
    """A worker sends its gradient once and receives the parameters once; nothing passes between two workers."""
    for server in range(world.size):
        before, mine = len(network.records), gradient(world.rank, 0, 7)
        answer.central_step(torch.arange(7.0), mine, Update(), network.group, server)
        sends, receives = messages(network, before)
        peers = [server] if world.rank != server else [rank for rank in range(world.size) if rank != server]
        case = f"central_step, 7 elements, rank {server} serves"
        expect("messages sent: (to rank, bytes)", sorted(sends), [(peer, 28) for peer in peers], case=case)
        expect("messages received: (from rank, bytes)", sorted(receives), [(peer, 28) for peer in peers], case=case)
        expect("operations besides send and recv", other_operations(network, before), [], case=case)
        expect("this rank's gradient, which may be used again", mine, gradient(world.rank, 0, 7), case=case)


@test(points=3, ranks=(1, 2, 3, 4))
def every_rank_serves_its_shard(answer, world, network):
    """With a server per shard, all ranks end with the same parameters as with one server."""
    for numel in SIZES:
        parameters, _ = train_sharded(answer, world, network, numel)
        case = f"sharded_step, {numel} elements on {world.size} ranks"
        expect("the parameters after two steps", parameters, by_hand(world.size, numel)[1], case=case)


@test(points=3, ranks=(3, 4))
def each_update_sees_its_shard_only(answer, world, network):
    """`update` is called once per step on every rank, with that rank's shard."""
    for numel in SIZES:
        _, update = train_sharded(answer, world, network, numel)
        start, stop = limits(world.size, numel)[world.rank :][:2]
        expected = [[values[start:stop] for values in call] for call in by_hand(world.size, numel)[0]]
        case = f"sharded_step, {numel} elements on {world.size} ranks"
        expect("(parameters, gradient) of each call", [list(call) for call in update.calls], expected, case=case)


@test(points=4, ranks=(3, 4))
def no_link_carries_more_than_another(answer, world, network):
    """Each rank sends the other shards of its gradient to their servers, and its updated shard to all other ranks."""
    before, mine = len(network.records), gradient(world.rank, 0, 7)
    answer.sharded_step(torch.arange(7.0), mine, Update(), network.group)
    sends, receives = messages(network, before)
    at, others = limits(world.size, 7), [rank for rank in range(world.size) if rank != world.rank]
    of = [4 * (stop - start) for start, stop in zip(at, at[1:], strict=False)]
    case = f"sharded_step, 7 elements on {world.size} ranks"
    expected = sorted([(rank, of[rank]) for rank in others] + [(rank, of[world.rank]) for rank in others])
    expect("messages sent: (to rank, bytes)", sorted(sends), expected, case=case)
    expect("messages received: (from rank, bytes)", sorted(receives), expected, case=case)
    expect("operations besides send and recv", other_operations(network, before), [], case=case)
    expect("this rank's gradient, which may be used again", mine, gradient(world.rank, 0, 7), case=case)


def subtract(parameters, total):
    parameters -= total


def updated_by_one_process(ranks, rank):
    """The server's parameters less the gradients of all ranks."""
    parameters = ranks[ranks[0]["server"]]["parameters"]
    return (exact(parameters) - sum(exact(each["gradient"]) for each in ranks)).to(parameters.dtype)


def call_central_step(answer, group, parameters, gradient, server):
    answer.central_step(parameters, gradient, subtract, group, server)
    return parameters


def call_sharded_step(answer, group, parameters, gradient):
    answer.sharded_step(parameters, gradient, subtract, group)
    return parameters


def shards_updated_by_one_process(ranks, rank):
    """The parameters, which are equal on all ranks, less the gradients of all ranks."""
    total = sum(exact(each["gradient"]) for each in ranks)
    return (exact(ranks[0]["parameters"]) - total).to(ranks[0]["parameters"].dtype)


def there_and_back(ranks):
    """Each rank but the server sends its gradient and receives the parameters; of shards the same in all."""
    parameters, size = ranks[0]["parameters"], len(ranks)
    return 2 * (size - 1) * parameters.numel() * parameters.element_size()


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(layouts=("slice",)),
        "gradient": Tensors(layouts=("slice",), like="parameters"),
        "server": Drawn(lambda rank, ranks, draw: draw % ranks, {"the last rank": -1}),
    },
    call=call_central_step,
    reference=updated_by_one_process,
    changes=("parameters",),
    replicas=True,
    max_bytes=there_and_back,
)
SHARDED = replace(
    DECLARATION,
    inputs={
        "parameters": Tensors(layouts=("slice",), differs=False),
        "gradient": Tensors(layouts=("slice",), like="parameters"),
    },
    call=call_sharded_step,
    reference=shards_updated_by_one_process,
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any dtype, size, layout, server and group, also one of only some ranks; calls do not influence each other."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(SHARDED, answer, world, network)
