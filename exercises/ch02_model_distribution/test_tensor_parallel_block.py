"""Tests of tensor_parallel_block: the reference has the full matrices, on one process, in float64, head by head."""

import torch
from torch import nn

from exercises.conditions import Declaration, Tensors, check_conditions
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from minidist.models.layers import rotary_tables
from minidist.simple.tensor_parallel import Region, SequenceParallelRegion

BATCH, HIDDEN, HEAD_DIM, THETA = 2, 5, 4, 100.0
TOLERANCE = 1e-11  # sums of a few hundred terms below 10, in float64 in another order
# Query heads, and key and value heads, by world size: one key head for all ranks, for some ranks, one or more per rank.
HEADS = {1: ((3, 3), (4, 2)), 2: ((6, 2), (6, 1), (4, 4)), 3: ((6, 1), (6, 3)), 4: ((8, 2), (4, 1), (8, 4), (8, 8))}


def draw(salt, *shape, dtype=torch.float64):
    """Return a tensor that is equal on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64).to(dtype)


def linear(salt, features, inputs, dtype=torch.float64):
    module = nn.Linear(inputs, features, bias=False, dtype=dtype)
    module.weight = nn.Parameter(draw(salt, features, inputs, dtype=dtype))
    return module


class FullMLP(nn.Module):
    def __init__(self, inner, dtype=torch.float64):
        super().__init__()
        self.gate_proj, self.up_proj = linear(2, inner, HIDDEN, dtype), linear(3, inner, HIDDEN, dtype)
        self.down_proj = linear(4, HIDDEN, inner, dtype)


class FullAttention(nn.Module):
    def __init__(self, heads, kv_heads):
        super().__init__()
        self.head_dim = HEAD_DIM
        self.q_proj, self.o_proj = linear(5, heads * HEAD_DIM, HIDDEN), linear(6, HIDDEN, heads * HEAD_DIM)
        self.k_proj, self.v_proj = linear(7, kv_heads * HEAD_DIM, HIDDEN), linear(8, kv_heads * HEAD_DIM, HIDDEN)


def leaves(module):
    """Return copies of the full weights, by name, that gather gradients."""
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}


def mlp_of_one_process(x, weights):
    gate, up, down = (weights[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = x @ gate.T
    return (inner / (1 + (-inner).exp()) * (x @ up.T)) @ down.T


def rotated(x):
    """Rotate the features i and i + HEAD_DIM / 2 of x (b, s, HEAD_DIM) as a pair, by an angle that grows with s."""
    pairs = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :])
    frequencies = THETA ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) * 2 / HEAD_DIM)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def attention_of_one_process(x, weights):
    q, k, v, o = (weights[f"{name}_proj.weight"] for name in "qkvo")
    outputs, ahead = [], torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    for head in range(heads := len(q) // HEAD_DIM):
        own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        shared = head * (len(k) // HEAD_DIM) // heads
        at = slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
        scores = rotated(x @ q[own].T) @ rotated(x @ k[at].T).mT / HEAD_DIM**0.5
        outputs.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ (x @ v[at].T))
    return torch.cat(outputs, -1) @ o.T


class Case:
    """A sharded layer and the full one, with an input and the gradient of the output that are equal on all ranks."""

    def __init__(self, answer, network, group, kind, shape, sequence=False, is_frozen=False):
        self.region, self.tokens = (SequenceParallelRegion if sequence else Region)(group), slice(None)
        self.length = 2 * group.size if sequence else 5
        if sequence:
            self.tokens = slice(2 * group.rank, 2 * group.rank + 2)
        full = FullMLP(shape) if kind == "mlp" else FullAttention(*shape)
        self.weights, self.x = leaves(full), draw(1, BATCH, self.length, HIDDEN).requires_grad_()
        self.full = dict(full.named_parameters())
        self.arriving = draw(9, BATCH, self.length, HIDDEN)
        reference = mlp_of_one_process if kind == "mlp" else attention_of_one_process
        self.expected = reference(self.x, self.weights)
        self.expected.backward(self.arriving)
        full.requires_grad_(not is_frozen)
        if kind == "mlp":
            self.layer = answer.TensorParallelMLP(full, self.region)
        else:
            self.layer = answer.TensorParallelAttention(full, self.region, heads_group(network, group, shape[1]))
        tables = rotary_tables(torch.arange(self.length), HEAD_DIM, THETA, torch.float64)
        self.others = () if kind == "mlp" else (tables,)
        self.own_x = self.x.detach()[:, self.tokens].clone().requires_grad_()
        inner = f"{shape} inner features" if kind == "mlp" else f"{shape[0]} query and {shape[1]} key heads"
        self.case = f"{inner}, {group.size} ranks"

    def forward(self):
        return self.layer(self.own_x, *self.others)

    def shard_of(self, name, full, ranks, rank):
        """Return a rank's shard of a full weight, or of its gradient."""
        dim = 1 if name[0] in "do" else 0
        parts = min(ranks, len(full) // HEAD_DIM) if name[0] in "kv" else ranks
        size = full.shape[dim] // parts
        return full.narrow(dim, rank * parts // ranks * size, size)

    def check(self, group):
        """Compare output, shards and gradients with those of one process, the gradients after a second backward too."""
        before = {name: p.detach().clone() for name, p in self.layer.named_parameters()}
        out = self.forward()
        expect("the output", out, self.expected.detach()[:, self.tokens], tolerance=TOLERANCE, case=self.case)
        out.backward(self.arriving[:, self.tokens])
        expect("names of the parameters", sorted(before), sorted(self.weights), case=self.case)
        for name, full in self.weights.items():
            wanted = self.shard_of(name, full.detach(), group.size, group.rank)
            expect(f"this rank's shard of {name}", before[name], wanted, case=self.case)
            parameter = dict(self.layer.named_parameters())[name]
            expect_own_memory(name, parameter, self.full[name], full, self.case)
            expect(f"{name} after forward and backward", parameter.detach(), wanted, case=self.case)
        self.check_gradients(group, 1)
        self.forward().backward(self.arriving[:, self.tokens])
        self.check_gradients(group, 2)

    def check_gradients(self, group, times):
        """Compare the gradients with `times` those of one process."""
        case = self.case + ", after a second backward" * (times > 1)
        for name, parameter in self.layer.named_parameters():
            if parameter.grad is None:
                raise Wrong("wrong", f"the gradient of {name}", "a tensor", "None", case=case)
            expected = times * self.shard_of(name, self.weights[name].grad, group.size, group.rank)
            what = f"the gradient of this rank's shard of {name}"
            expect(what, parameter.grad, expected, tolerance=10 * TOLERANCE, case=case)
        expected = times * self.x.grad[:, self.tokens]
        expect("the gradient of the input", self.own_x.grad, expected, tolerance=10 * TOLERANCE, case=case)


def expect_own_memory(name, shard, original, full, case):
    """Fail unless a shard is no view of the original full matrix, which still has the elements of `full`."""
    if shard.untyped_storage().data_ptr() == original.untyped_storage().data_ptr():
        raise Wrong("wrong", f"the memory of the shard of {name}", "its own", "that of the full matrix", case=case)
    expect(f"the full {name} afterwards", original.detach(), full.detach(), case=case)


def heads_group(network, group, kv_heads):
    """Return the ranks of `group` that hold the key and value heads of this rank; None if it is the only one."""
    if kv_heads >= group.size:
        return None
    return group if kv_heads == 1 else network.pair_group  # two heads on four ranks


def groups_of(world, network):
    """Return the group of all ranks and, on 4 ranks, this rank's group of every other rank."""
    return [network.group, *([network.divided_group] if world.size == 4 else [])]


@test(points=4, ranks=(1, 2, 3, 4))
def mlp_of_one_process_in_shards(answer, world, network):
    """The feed-forward layer has the output and the gradients of one process; each rank holds its inner features."""
    for group in groups_of(world, network):
        for each in (1, 3, 8):
            Case(answer, network, group, "mlp", each * group.size).check(group)


@test(points=5, ranks=(1, 2, 3, 4))
def attention_of_one_process_in_shards(answer, world, network):
    """So has attention: each rank holds its query heads, and the key and value heads that they attend to."""
    for group in groups_of(world, network):
        for heads in HEADS[group.size]:
            Case(answer, network, group, "attention", heads).check(group)


@test(points=3, ranks=(2, 3, 4))
def one_all_reduce_each_way(answer, world, network):
    """A layer all-reduces (b, s, h) once in forward and once in backward, whatever its number of inner features."""
    for kind, shape in (("mlp", world.size), ("mlp", 50 * world.size), ("attention", HEADS[world.size][0])):
        case, before = Case(answer, network, network.group, kind, shape), len(network.records)
        out = case.forward()
        forward = [(record.name, tuple(record.shape)) for record in network.records[before:]]
        out.backward(case.arriving)
        backward = [(record.name, tuple(record.shape)) for record in network.records[before + len(forward) :]]
        wanted = [("all_reduce", (BATCH, case.length, HIDDEN))]
        expect("operations in forward", forward, wanted, case=f"{kind}, {case.case}")
        if kind == "attention" and shape[1] < world.size:  # and the gradients of the heads that others hold as well
            wanted = sorted([*wanted, *[("all_reduce", (HEAD_DIM, HIDDEN))] * 2])
            backward = sorted(backward)
        expect("operations in backward", backward, wanted, case=f"{kind}, {case.case}")


@test(points=2, ranks=(2, 4))
def shards_own_their_memory(answer, world, network):
    """A shard is a new contiguous parameter, no view of the full one, which does not change; frozen stays frozen."""
    for kind, shape in (("mlp", 3 * world.size), ("attention", HEADS[world.size][0])):
        case = Case(answer, network, network.group, kind, shape)
        names = sorted(name for name, _ in case.layer.named_parameters())
        expect("names of the parameters", names, sorted(case.weights), case=case.case)
        for name, p in case.layer.named_parameters():
            found = [p.untyped_storage().nbytes(), p.is_contiguous(), p.requires_grad]
            what = f"of {name}: bytes of its storage, contiguous, requires_grad"
            expect(what, found, [8 * p.numel(), True, True], case=case.case)
    module = linear(1, 3 * world.size, HIDDEN)
    full = module.weight.requires_grad_(False)
    if answer.shard_weight(module, 0, network.group) is not module:
        wanted = "the module that it was given, with another weight"
        raise Wrong("wrong", "what shard_weight returns", wanted, "another module")
    expect("shape of the module's weight after shard_weight", list(module.weight.shape), [3, HIDDEN])
    what = "shape of the full parameter, which another module may use, after shard_weight"
    expect(what, list(full.shape), [3 * world.size, HIDDEN])
    expect("whether the shard of a frozen weight requires a gradient", module.weight.requires_grad, False)
    answer.sum_replica_gradients(network.group, module.weight)
    for num_shards in (each for each in (1, 2, 4) if world.size % each == 0):
        for dim, dtype in ((0, torch.float64), (1, torch.float32)):
            module = linear(1, 8, 12, dtype)
            full, copy = module.weight, module.weight.detach().clone()
            answer.shard_weight(module, dim, network.group, num_shards)
            case = f"shard_weight(module, {dim}, group, {num_shards}), weight (8, 12) of {dtype}, {world.size} ranks"
            size = copy.shape[dim] // num_shards
            wanted = copy.narrow(dim, world.rank // (world.size // num_shards) * size, size)
            expect("the shard", module.weight.detach(), wanted, case=case)
            found = [str(module.weight.dtype), module.weight.is_contiguous(), module.weight.requires_grad]
            expect("dtype, contiguous, requires_grad", found, [str(dtype), True, True], case=case)
            expect_own_memory("weight", module.weight, full, copy, case)
    for kind, shape in (("mlp", 3 * world.size), ("attention", HEADS[world.size][0])):
        case = Case(answer, network, network.group, kind, shape, is_frozen=True)
        found = sorted({p.requires_grad for p in case.layer.parameters()})
        expect("whether shards of frozen weights require a gradient", found, [False], case=case.case)


@test(points=2, ranks=(2, 3))
def with_the_sequence_sharded(answer, world, network):
    """With a sequence-parallel region each rank has its own tokens outside of the layer."""
    Case(answer, network, network.group, "mlp", 3 * world.size, sequence=True).check(network.group)
    for heads in HEADS[world.size]:
        Case(answer, network, network.group, "attention", heads, sequence=True).check(network.group)


@test(points=2, ranks=(2, 3, 4))
def gradients_of_replicas_are_summed(answer, world, network):
    """After sum_replica_gradients every backward adds the sum of the ranks' gradients to .grad of each parameter."""
    for group in groups_of(world, network):
        replicas, other = [nn.Parameter(draw(salt, 3, 2)) for salt in (1, 2)], nn.Parameter(draw(3, 3, 2))
        frozen = nn.Parameter(draw(4, 3, 2), requires_grad=False)
        answer.sum_replica_gradients(group, replicas[0], frozen, replicas[1])
        total, case = group.size * (group.size + 1) / 2, f"{group.size} ranks, this is rank {group.rank}"
        for times in (1, 2):
            # Each is used twice in a rank's own loss, whose gradient is (rank + 1) x (2 x its value + 1).
            losses = [(group.rank + 1) * (each.square().sum() + each.sum()) for each in (*replicas, other)]
            sum(losses).backward()
            for index, each in enumerate(replicas):
                wanted, what = times * total * (2 * each.detach() + 1), f"the gradient of parameter {index}"
                expect(what, each.grad, wanted, tolerance=TOLERANCE, case=f"{case}, backward number {times}")
            wanted = times * (group.rank + 1) * (2 * other.detach() + 1)
            what = "the gradient of a parameter that was not given"
            expect(what, other.grad, wanted, tolerance=TOLERANCE, case=f"{case}, backward number {times}")


@test(points=2, ranks=(1, 3))
def attention_calls_attend(answer, world, network):
    """Scores and softmax are left to `attend`, which context parallelism replaces; it gets this rank's heads."""
    heads, kv_heads = HEADS[world.size][-1]
    case, seen = Case(answer, network, network.group, "attention", (heads, kv_heads)), []

    def attend(query, key, value):
        seen.append([list(each.shape) for each in (query, key, value)])
        return torch.zeros_like(query)

    case.layer.attend = attend
    expect("the output if `attend` returns zeros", case.forward(), torch.zeros(BATCH, case.length, HIDDEN).tolist())
    wanted = [[BATCH, heads // world.size, case.length, HEAD_DIM]]  # keys may be repeated, for each query head
    expect("shape of the query in each call of `attend`", [shapes[0] for shapes in seen], wanted, case=case.case)
    expect("shapes of key and value", seen[0][1], seen[0][2], case=case.case)


def call_mlp(answer, group, hidden):
    layer = answer.TensorParallelMLP(FullMLP(3 * group.size, hidden.dtype), Region(group))
    return layer(hidden[None])


def mlp_reference(ranks, rank):
    x = ranks[rank]["hidden"]
    weights = {name: p.double() for name, p in FullMLP(3 * len(ranks), x.dtype).named_parameters()}
    return mlp_of_one_process(x.double()[None], weights).to(x.dtype)


DECLARATION = Declaration(
    inputs={
        "hidden": Tensors(
            dtypes=(torch.float64, torch.float32),
            layouts=("slice", "transposed"),
            columns=HIDDEN,
            non_finite=False,
            differs=False,
        )
    },
    call=call_mlp,
    reference=mlp_reference,
    replicas=True,
    has_parameters=True,
    roundings=400,  # products and sums of at most 21 inner features, which partly cancel
    # One all-reduce of the output.
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * ranks[0]["hidden"].nbytes,
)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any number of tokens and layout, also no tokens, in float64 and float32; in groups of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
