"""Tests of replica_digest: the test changes one bit on a rank, and knows where."""

import hashlib
import itertools

import torch
from torch import nn

from exercises.conditions import Declaration, Tensors, check_conditions
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.comm import all_gather_object

NAMES = ("weight", "bias", "half", "count", "mask", "step", "trained", "every second", "empty")
OTHER_DTYPES = ("float16", "float8_e4m3fn", "float8_e5m2", "complex64", "int8", "uint8", "int16", "int32")


def replica():
    """Tensors of many dtypes and shapes, equal on all ranks; one is not contiguous."""
    return {
        "weight": torch.arange(12.0).reshape(3, 4).T,
        "bias": torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64),
        "half": torch.linspace(-1, 1, 5).bfloat16(),
        "count": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "step": torch.tensor(3.0),
        "trained": nn.Parameter(torch.tensor([0.25, 3.0])),
        "empty": torch.zeros(0),
        "every second": torch.arange(6.0)[::2],
    }


def differing(answer, network, tensors):
    """The result for tensors that all ranks must have."""
    everyone = network.group.ranks
    return differing_in_sets(answer, network, {name: (tensor, everyone) for name, tensor in tensors.items()})


def differing_in_sets(answer, network, tensors):
    found = answer.differing_replicas(tensors, network.group)
    if not isinstance(found, dict):
        raise Wrong("type", "the result has the wrong type", "a dict {name: list of ranks}", repr(found)[:80])
    return found


def named(size, ranks):
    """The ranks that can be blamed when `ranks`, all with one other value, differ from the rest."""
    return sorted(ranks) if 2 * len(ranks) < size else list(range(size)) if 2 * len(ranks) == size else None


@test(points=3)
def digest_of_the_bits(answer, world, network):
    """A digest is the first 8 bytes of the SHA-256 of the elements' bytes, in row-major order, of any dtype."""
    tensors = replica() | {name: torch.arange(4).to(getattr(torch, name)) for name in OTHER_DTYPES}
    tensors |= {
        "one number": torch.tensor(1.5).bfloat16(),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(1, 2, 0),
    }
    tensors["a row, expanded"] = torch.arange(3.0).expand(2, 3)
    for name, tensor in tensors.items():
        elements = tensor.detach().flatten().tolist()
        content = b"".join(torch.tensor([x], dtype=tensor.dtype).view(torch.uint8).numpy().tobytes() for x in elements)
        got, before = answer.tensor_digest(tensor), tensor.detach().clone()
        case = f"{name}: {tensor.dtype}, shape {tuple(tensor.shape)}"
        expect("tensor_digest", got, hashlib.sha256(content).digest()[:8], case=case)
        expect("the tensor afterwards", tensor.detach(), before, case=case)
    tensor = torch.arange(40_000)
    content, case = tensor.numpy().tobytes(), "40,000 elements of int64"
    expect("tensor_digest", answer.tensor_digest(tensor), hashlib.sha256(content).digest()[:8], case=case)


@test(points=2, ranks=(1, 2, 3))
def equal_replicas_differ_nowhere(answer, world, network):
    """The result is {} if all ranks have the same bits, and no tensor changes."""
    tensors = replica()
    expect("the result", differing(answer, network, tensors), {}, case="equal tensors on all ranks")
    for name, tensor in replica().items():
        expect(f"the tensor {name} afterwards", tensors[name], tensor)
    if world.rank == 0:
        tensors["weight"] = tensors["weight"].contiguous()
    case = "equal tensors, of which rank 0 holds one contiguously and the others transposed"
    expect("the result", differing(answer, network, tensors), {}, case=case)


@test(points=4, ranks=(2, 3, 4))
def each_rank_and_tensor(answer, world, network):
    """One element differs on one rank: each rank in turn, and each tensor."""
    for rank in range(world.size):
        for name in NAMES[:-1]:
            tensors = replica()
            if world.rank == rank:
                tensor = tensors[name].view(-1) if tensors[name].dim() == 0 else tensors[name]
                tensor = tensor[-1] if tensor.dim() == 2 else tensor
                with torch.no_grad():
                    tensor[-1] = not tensor[-1] if tensor.dtype == torch.bool else tensor[-1] + 1
            got = differing(answer, network, tensors)
            expect("the result", got, {name: named(world.size, [rank])}, case=f"rank {rank} has another {name}")


@test(points=3, ranks=(3,))
def bits_and_not_numbers(answer, world, network):
    """What compares as equal, or has an equal sum, may still differ in its bits."""
    nan = torch.tensor([0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    pairs = {
        "0.0 and -0.0": (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])),
        "two different NaNs": (nan[:1].clone(), nan[1:].clone()),
        "exchanged elements": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])),
        "exchanged rows": (torch.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2).flip(0)),
    }
    pairs["the last bit of float64"] = (torch.ones(1).double(), torch.ones(1).double() + 2.0**-52)
    for name, (usual, other) in pairs.items():
        got = differing(answer, network, {"value": other if world.rank == 1 else usual})
        expect("the result", got, {"value": [1]}, case=f"{name} on rank 1")
    got = differing(answer, network, {"value": nan.clone()})
    expect("the result", got, {}, case="the same NaNs on all ranks")


@test(points=3, ranks=(2, 3, 4))
def majority_or_everyone(answer, world, network):
    """Without a value that more than half of the ranks have, every rank is named."""
    if world.size == 4:
        for pair in ((0, 1), (1, 3), (0, 3)):
            got = differing(answer, network, {"value": torch.ones(2) * (2 if world.rank in pair else 1)})
            expect("the result", got, {"value": [0, 1, 2, 3]}, case=f"ranks {pair} have another value than the others")
        value = torch.ones(2) * max(world.rank, 1)
        expect(
            "the result",
            differing(answer, network, {"value": value}),
            {"value": [0, 1, 2, 3]},
            case="values 1, 1, 2, 3",
        )
    got = differing(answer, network, {"value": torch.ones(2) * world.rank})
    expect("the result", got, {"value": [*range(world.size)]}, case="another value on every rank")
    if world.size == 3:
        got = differing(answer, network, {"value": torch.ones(2) * (world.rank == 0)})
        expect("the result", got, {"value": [0]}, case="rank 0 differs from the others")
    every_assignment(answer, world, network)


def every_assignment(answer, world, network):
    """Compare a tensor for each way in which the ranks can have one of three values, or lack it."""
    tensors, wanted = {}, {}
    for values in itertools.product((0, 1, 2, None), repeat=world.size):
        if 2 * values.count(None) > world.size:
            continue  # more than half lack it: nothing is said about that
        name = "values " + ", ".join("none" if value is None else str(value) for value in values)
        if values[world.rank] is not None:
            tensors[name] = torch.tensor(values[world.rank])
        usual = [value for value in (0, 1, 2) if 2 * values.count(value) > world.size]
        if len(set(values)) > 1:
            wanted[name] = [rank for rank, value in enumerate(values) if [value] != usual]
    got = differing(answer, network, tensors)
    for name in {**wanted, **got}:
        expect("the ranks named", got.get(name), wanted.get(name), case=f"{name} on the ranks 0 to {world.size - 1}")


@test(points=2, ranks=(3,))
def several_differences(answer, world, network):
    """Every tensor has ranks of its own; those that are equal are not named."""
    tensors = replica()
    if world.rank == 2:
        tensors["weight"] = tensors["weight"] * 2
    if world.rank == 0:
        tensors["count"] = tensors["count"] + 1
        tensors["mask"] = ~tensors["mask"]
    wanted = {"weight": [2], "count": [0], "mask": [0]}
    expect("the result", differing(answer, network, tensors), wanted)
    everywhere = all_gather_object(differing(answer, network, tensors), network.group)
    expect("the result on each rank", everywhere, [wanted] * world.size)


@test(points=3, ranks=(4,))
def sets_of_replicas(answer, world, network):
    """Only ranks that must have the same bits are compared, and a rank without its tensor differs."""
    rank, everyone = world.rank, (0, 1, 2, 3)
    pairs, halves = (0, 2) if rank % 2 == 0 else (1, 3), (0, 1) if rank < 2 else (2, 3)
    three = (0, 1, 3)
    tensors = {
        "own": (torch.tensor(rank), (rank,)),
        "pairs": (torch.ones(2) * (rank % 2), pairs),
        "one half": (torch.ones(3) * (rank == 3), halves),
        "both pairs": (torch.ones(3) * (rank < 2), pairs),
        "all": (torch.arange(3) * (1 if rank != 2 else 2), everyone),
    }
    if rank in three:
        tensors["three"] = torch.ones(2) * (rank == 3), three
    if rank != 1:
        tensors["missing"] = torch.zeros(0), everyone
    wanted = {"all": [2], "both pairs": [0, 1, 2, 3], "missing": [1], "one half": [2, 3], "three": [3]}
    expect("the result", differing_in_sets(answer, network, tensors), wanted)
    group = network.divided_group
    tensors = {"value": (torch.ones(2) * rank, group.ranks), "equal": (torch.ones(2), group.ranks)}
    got, case = answer.differing_replicas(tensors, group), f"a group of the global ranks {group.ranks}"
    expect("the result", got, {"value": list(group.ranks)}, case=case)


@test(points=2, ranks=(2, 3))
def few_bytes(answer, world, network):
    """What is sent does not grow with the sizes of the tensors, and the number of collectives not with their number."""
    sent = {}
    for count, numel in ((1, 3), (1, 30_000), (12, 3)):
        before = len(network.records)
        differing(answer, network, {str(i): torch.full((numel,), float(i)) for i in range(count)})
        records = network.records[before:]
        sent[count, numel] = len(records), sum(record.payload_bytes for record in records)
    difference = sent[1, 30_000][1] - sent[1, 3][1]
    expect("the bytes that 30,000 elements send more than 3 elements", difference, 0, tolerance=64)
    expect("the number of collectives for 12 tensors", sent[12, 3][0], sent[1, 3][0])
    most = 200 * 12 * world.size
    if sent[12, 3][1] - sent[1, 3][1] > most:
        raise Wrong("wrong", "bytes for 11 more tensors", f"at most {most}", str(sent[12, 3][1] - sent[1, 3][1]))


def digests_of_two(answer, group, value, equal):
    ranks = group.ranks
    found = answer.differing_replicas({"value": (value, ranks), "equal": (equal, ranks)}, group)
    return {name: [ranks.index(rank) for rank in differing] for name, differing in found.items()}


def found_by_bytes(ranks, rank):
    """The values of the ranks all differ, except where they have no element, or where there is one rank."""
    differ = len(ranks) > 1 and ranks[0]["value"].numel() > 0
    return {"value": [*range(len(ranks))]} if differ else {}


DECLARATION = Declaration(
    inputs={"value": Tensors(), "equal": Tensors(differs=False, non_finite=False)},
    call=digests_of_two,
    reference=found_by_bytes,
    replicas=True,
    wire=False,
    max_bytes=lambda ranks: 1000 * len(ranks) * (len(ranks) - 1),
)


@test(points=1, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size and memory layout, NaN and infinities, and a group of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
