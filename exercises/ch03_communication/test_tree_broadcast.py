"""Tests of tree_broadcast: any number of ranks, any root, and the minimal number of rounds."""

from dataclasses import replace

import torch

from exercises.conditions import FLOATS, Choices, Declaration, Drawn, Tensors, check_conditions, reduced
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.traffic import TransferRecorder

SHAPES = [(5,), (2, 3), (1,), (0,)]


def value(rank, shape):
    """Return a rank's tensor before the broadcast: different on every rank."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * (rank + 1)


def run(answer, world, network, shape, src):
    """Broadcast from `src`; return this rank's tensor and its transfers."""
    tensor = value(world.rank, shape)
    with TransferRecorder(network) as recorder:
        result = answer.tree_broadcast(tensor, src, network.group)
    expect("the result of tree_broadcast, which changes the tensor in place", result, None)
    return tensor, recorder


def run_reduce(answer, world, network, shape, dst):
    """Reduce to `dst`; return this rank's tensor and its transfers."""
    tensor = value(world.rank, shape)
    with TransferRecorder(network) as recorder:
        result = answer.tree_reduce(tensor, dst, network.group)
    expect("the result of tree_reduce, which changes the tensor in place", result, None)
    return tensor, recorder


@test(points=3, ranks=(1, 2, 3, 4))
def all_ranks_get_the_tensor(answer, world, network):
    """Every rank ends with the tensor of rank 0, whatever the number of ranks."""
    for shape in SHAPES:
        tensor, _ = run(answer, world, network, shape, 0)
        expect("the tensor after the broadcast from rank 0", tensor, value(0, shape))


@test(points=2, ranks=(2, 3))
def from_any_root(answer, world, network):
    """Every rank ends with the root's tensor, for every choice of root."""
    for src in range(world.size):
        tensor, _ = run(answer, world, network, (4,), src)
        expect(f"the tensor after the broadcast from rank {src}", tensor, value(src, (4,)))


@test(points=2, ranks=(3, 4))
def each_rank_receives_once(answer, world, network):
    """Each rank but the root receives the tensor once, and the root never."""
    for src in range(world.size):
        _, recorder = run(answer, world, network, (6,), src)
        received = recorder.elements_received()
        expect("elements received", received, 0 if world.rank == src else 6)


@test(points=3, ranks=(4, 5, 7))
def number_of_rounds_is_minimal(answer, world, network):
    """The number of ranks with the tensor doubles in each round: ceil(log2(ranks)) rounds, one send per rank each."""
    for src in range(world.size):
        _, recorder = run(answer, world, network, (3,), src)
        transfers_by_rank, reached, rounds = recorder.gather_transfers(), {src: 0}, 0
        waiting = [src]
        while waiting:
            rank = waiting.pop()
            for number, peer in enumerate(peer for kind, peer, elements in transfers_by_rank[rank] if kind == "send"):
                if peer not in reached:
                    reached[peer] = reached[rank] + number + 1
                    waiting.append(peer)
            rounds = max(rounds, reached[rank])
        expect("ranks that the messages reach from the root", sorted(reached), list(range(world.size)))
        expect("rounds until the last rank has the tensor", rounds, (world.size - 1).bit_length())


@test(points=3, ranks=(1, 2, 3, 4))
def reduces_to_any_root(answer, world, network):
    """tree_reduce: the root ends with the sum of the tensors of all ranks, for every choice of root."""
    for shape in SHAPES:
        for dst in range(world.size):
            tensor, _ = run_reduce(answer, world, network, shape, dst)
            if world.rank == dst:
                expected = sum(value(rank, shape) for rank in range(world.size))
                expect(f"the tensor of rank {dst} after the reduce to it", tensor, expected)


@test(points=2, ranks=(4, 5, 7))
def rounds_of_the_reduce(answer, world, network):
    """tree_reduce: each rank but the root sends once, and no rank receives more than ceil(log2(ranks)) tensors."""
    for dst in range(world.size):
        _, recorder = run_reduce(answer, world, network, (3,), dst)
        transfers_by_rank = recorder.gather_transfers()
        sent = [sum(elements for kind, _, elements in each if kind == "send") for each in transfers_by_rank]
        expect("elements sent, by rank", sent, [3 * (rank != dst) for rank in range(world.size)])
        rounds = _rounds(transfers_by_rank, dst)
        expect("rounds until the root has the sum", rounds, (world.size - 1).bit_length())


def _rounds(transfers_by_rank, rank):
    """Rounds until a rank has received all that it receives, one tensor per round."""
    ended = 0
    for kind, peer, elements in transfers_by_rank[rank]:
        if kind == "recv" and elements:
            ended = max(ended, _rounds(transfers_by_rank, peer)) + 1
    return ended


def broadcast(answer, group, tensor, root):
    answer.tree_broadcast(tensor, root, group)
    return tensor


def reduce(answer, group, tensor, root, op):
    answer.tree_reduce(tensor, root, group, op)
    return tensor if group.rank == root else None


TENSORS = Tensors(layouts=("slice", "scalar"))
ROOTS = Drawn(lambda rank, ranks, draw: draw % ranks, {"rank 1": 1, "the last rank of 4 or 7": 27})
BROADCAST = Declaration(
    inputs={"tensor": TENSORS, "root": ROOTS},
    call=broadcast,
    reference=lambda ranks, rank: ranks[ranks[0]["root"]]["tensor"],
    changes=("tensor",),
    replicas=True,
    max_bytes=lambda ranks: (len(ranks) - 1) * ranks[0]["tensor"].nbytes,
)
REDUCE = Declaration(
    inputs={"tensor": TENSORS, "root": ROOTS, "op": Choices(("sum", "max", "min"))},
    call=reduce,
    reference=lambda ranks, rank: (
        reduced([each["tensor"] for each in ranks], ranks[0]["op"]) if rank == ranks[0]["root"] else None
    ),
    changes=("tensor",),
    max_bytes=BROADCAST.max_bytes,
)
ROUNDED = replace(
    REDUCE,
    inputs={
        "tensor": Tensors(dtypes=FLOATS, layouts=(), sizes=False, non_finite=False),
        "root": ROOTS,
        "op": Choices(("product",)),
    },
    roundings=8,  # a product of at most seven numbers
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size, layout, root, reduction and group, also one of only some ranks."""
    for declaration in (BROADCAST, REDUCE, ROUNDED):
        check_conditions(declaration, answer, world, network)
