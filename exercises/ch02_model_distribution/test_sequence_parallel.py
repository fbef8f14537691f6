"""Tests of sequence_parallel: the reference is the unsharded model on one process, in float64.

The package's simple `apply_tensor_parallel` shards the model, with the answer in place of its region and of its
`describe_shard`.
"""

import weakref
from dataclasses import replace
from types import FunctionType

import torch

from exercises.conditions import Choices, Declaration, Drawn, Tensors, check_conditions, reduced
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_gather_object
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallel.tensor import simple
from minidist.parallel.tensor.split import ParamShard
from minidist.parameters import Box, named_parameters

LENGTH, BATCH = 12, 2
TOLERANCE = 1e-12  # sums of a few hundred terms of about 1e-2, in float64 in another order
CONFIG = ModelConfig(24, 24, 24, 2, 12, 12, 16, tie_embeddings=False)
# The dimension along which a weight is sharded; norms are replicated.
DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
DIMS |= {"embed_tokens": 0, "lm_head": 0}


def model_of(config):
    """Return the unsharded model, equal on all ranks; its norms are not all ones, so that a missing norm shows."""
    model = Transformer(config).double()
    init_parameters(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


def batch():
    """Return tokens and labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(24, (BATCH, LENGTH), generator=generator) for _ in range(2)]


def sharded_model(answer, group, sequence, config=CONFIG):
    """Shard the model with the answer's region and descriptions: (model, this rank's shards by name)."""
    model, package = model_of(config), simple.apply_tensor_parallel
    names = {name: getattr(answer, name) for name in ("SequenceParallelRegion", "describe_shard")}
    apply = FunctionType(package.__code__, vars(simple) | names, package.__name__, package.__defaults__)
    return model, apply(model, group, sequence)


def groups_of(world, network):
    """Return the group of all ranks and, on 4 ranks, this rank's group of every other rank."""
    return [network.group, *([network.divided_group] if world.size == 4 else [])]


def case_of(group, sequence, config=CONFIG):
    """Describe a model and how it is sharded, for the message."""
    how = "sequence parallelism" if sequence else "tensor parallelism only"
    return f"{how}, {group.size} ranks, {config.num_kv_heads} key and value heads"


def summed(shard, grad, group):
    """Return this rank's gradient, summed over the ranks that hold the same shard if it is described as partial."""
    everywhere = all_gather_object(grad.tolist(), group)  # known to all ranks, whatever `partial` says
    grads = [torch.tensor(everywhere[rank], dtype=torch.float64) for rank in shard.holders]
    return sum(grads) if shard.partial else grad


def gradients_are_right(answer, group, sequence, config, names):
    """Compare the gradients of the selected parameters, reduced as their descriptions say."""
    model, shards = sharded_model(answer, group, sequence, config)
    model(*batch())[0].backward()
    one = model_of(config)
    one(*batch())[0].backward()
    parameters = named_parameters(model)
    for name, full in named_parameters(one).items():
        if names(name):
            got = summed(shards[name], parameters[name].grad, group)
            how = "summed over its holders (partial)" if shards[name].partial else "not summed (not partial)"
            what, wanted = f"the gradient of {name}, {how}", full.grad[shards[name].box.slices]
            expect(what, got, wanted, case=case_of(group, sequence, config), tolerance=TOLERANCE)


def expected_shard(name, full, config, ranks, rank, sequence):
    """Return the shard that a rank needs for its own query heads, features or tokens of the vocabulary."""
    kind = name.split(".")[-2]

    def interval(rank):
        if kind not in ("k_proj", "v_proj"):
            each = full[DIMS[kind]] // ranks
            return rank * each, (rank + 1) * each
        own = range(rank * config.num_heads // ranks, (rank + 1) * config.num_heads // ranks)
        heads = [head * config.num_kv_heads // config.num_heads for head in own]
        width = full[0] // config.num_kv_heads
        return heads[0] * width, (heads[-1] + 1) * width

    if kind not in DIMS:
        return ParamShard(Box.whole(full), tuple(range(ranks)), sequence and ranks > 1)
    start, stop = [0] * len(full), list(full)
    start[DIMS[kind]], stop[DIMS[kind]] = interval(rank)
    holders = tuple(other for other in range(ranks) if interval(other) == interval(rank))
    return ParamShard(Box(tuple(start), tuple(stop)), holders, len(holders) > 1)


def kv_heads_of(size):
    """Return numbers of key and value heads: one for all ranks, one for some of them, one or more for each."""
    return {1: (3, 12), 2: (1, 2, 12), 3: (1, 3, 6), 4: (1, 2, 4, 12)}[size]


@test(points=2, ranks=(1, 2, 3, 4))
def tokens_gathered_and_partial_results_summed(answer, world, network):
    """gather returns the tokens of all ranks, in rank order; reduce returns this rank's tokens of the ranks' sum."""
    for group in groups_of(world, network):
        region, ranks, rank = answer.SequenceParallelRegion(group), group.size, group.rank
        for tokens, features in ((1, 1), (2, 1), (1, 3)):
            every = torch.arange(1.0, 2 * ranks * tokens * features + 1).view(2, ranks * tokens, features)
            own = every[:, rank * tokens : (rank + 1) * tokens].clone()
            case = f"{ranks} ranks, 2 sequences, {tokens} tokens on each rank, {features} features; this is rank {rank}"
            expect(f"gather({own.tolist()})", region.gather(own), every, case=case)
            total = sum(10**other for other in range(ranks)) * own
            expect(f"reduce({(10**rank * every).tolist()})", region.reduce(10**rank * every), total, case=case)
        for method in (region.gather, region.reduce):
            kept = []
            for _ in range(4):
                x = torch.ones(2, ranks, 3)
                kept.append(weakref.ref(x))
                expect("requires_grad of a result if x needs no gradient", method(x).requires_grad, False)
            # The messages of the last call may still hold its argument, those of the first do not.
            expect("x is still referenced after three more calls, so memory grows", kept[0]() is not None, False)


@test(points=3, ranks=(1, 2, 3, 4))
def loss_is_that_of_one_process(answer, world, network):
    """Every rank has the loss of the unsharded model, with and without sequence parallelism."""
    with torch.no_grad():
        expected = model_of(CONFIG)(*batch())[0].item()
    for group in groups_of(world, network):
        for sequence in (True, False):
            model, _ = sharded_model(answer, group, sequence)
            got = model(*batch())[0].item()
            expect("the loss", got, expected, case=case_of(group, sequence), tolerance=1e-11)  # of about 80


@test(points=3, ranks=(2, 3))
def equal_bytes_and_fewer_tokens_per_norm(answer, world, network):
    """Each all-reduce becomes an all-gather and a reduce-scatter of equal bytes; a norm sees LENGTH / ranks tokens."""
    seen, counts, sent = {}, {}, {}
    for sequence in (False, True):
        model, _ = sharded_model(answer, network.group, sequence)
        lengths, before = [], len(network.records)
        model.model.norm.register_forward_hook(lambda _, args, out, lengths=lengths: lengths.append(out.shape[1]))
        model(*batch())[0].backward()
        # Without those of the loss, which all-reduces no features: (b, s).
        records = [one for one in network.records[before:] if one.name != "all_reduce" or one.shape[-1] != LENGTH]
        seen[sequence], counts[sequence] = lengths, len(records)
        sent[sequence] = sum(record.wire_bytes for record in records)
    case = f"{world.size} ranks"
    expect("tokens in the last norm, with sequence parallelism", seen[True], [LENGTH // world.size], case=case)
    expect("collectives with sequence parallelism", counts[True], 2 * counts[False], case=case)
    expect("bytes sent with sequence parallelism", sent[True], sent[False], case=case)


@test(points=3, ranks=(2, 3, 4))
def norms_are_partial(answer, world, network):
    """With sequence parallelism the gradient of every norm is partial: its sum over the ranks is one process's."""
    for group in groups_of(world, network):
        gradients_are_right(answer, group, True, CONFIG, lambda name: "norm" in name)


@test(points=3, ranks=(2, 3, 4))
def other_gradients_do_not_change(answer, world, network):
    """Key heads with several holders stay partial, and without sequence parallelism no norm is partial."""
    for group in groups_of(world, network):
        for kv_heads in kv_heads_of(group.size)[:-1]:
            config = replace(CONFIG, num_kv_heads=kv_heads)
            gradients_are_right(answer, group, True, config, lambda name: "norm" not in name)
            gradients_are_right(answer, group, False, config, lambda name: True)


@test(points=3, ranks=(1, 2, 3, 4))
def box_and_holders_of_every_shard(answer, world, network):
    """Each shard is described with its box, the ranks that hold it and whether its gradient is partial."""
    for group in groups_of(world, network):
        for kv_heads in kv_heads_of(group.size):
            for sequence in (False, True):
                config = replace(CONFIG, num_kv_heads=kv_heads, tie_embeddings=kv_heads == 1)
                full = {name: tuple(p.shape) for name, p in named_parameters(model_of(config)).items()}
                _, shards = sharded_model(answer, group, sequence, config)
                for name, shape in full.items():
                    wanted = expected_shard(name, shape, config, group.size, group.rank, sequence)
                    case = case_of(group, sequence, config)
                    for part in ("box", "holders", "partial"):
                        got, right = (show_part(each, part) for each in (shards[name], wanted))
                        expect(f"{part} of {name}, {shape}", got, right, case=case)


def show_part(shard, part):
    """Return one attribute of a description, of types that its message shows."""
    value = getattr(shard, part)
    return repr(value) if part == "box" else value


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
    call=lambda answer, group, x, batch: answer.SequenceParallelRegion(group).gather(
        activations(x, batch, len(x) // batch)
    ),
    reference=gather_reference,
    replicas=True,
    max_bytes=lambda ranks: (len(ranks) - 1) * len(ranks) * ranks[0]["x"].nbytes,
)
REDUCE = replace(
    GATHER,
    inputs={"x": tensors(lambda ranks: 6 * ranks), "batch": Choices((2, 1, 3, 6))},
    call=lambda answer, group, x, batch: answer.SequenceParallelRegion(group).reduce(
        activations(x, batch, len(x) // batch)
    ),
    reference=reduce_reference,
    replicas=False,
    max_bytes=lambda ranks: (len(ranks) - 1) * ranks[0]["x"].nbytes,
)

# Parameters, by the end of their names.
NAMES = ["model.embed_tokens", "lm_head", "model.norm", "model.layers.3.input_layernorm"]
NAMES += ["model.layers.0.post_attention_layernorm", *(f"model.layers.1.self_attn.{one}_proj" for one in "qkvo")]
NAMES += [f"model.layers.10.mlp.{one}_proj" for one in ("gate", "up", "down")]


def described(rank, ranks, number):
    """Return a parameter: (name, shape, shape of its shard, sequence, the expected description)."""
    name, sequence, few = f"{NAMES[number // 4]}.weight", bool(number % 2), bool(number // 2 % 2)
    # Few: one key and value head for all ranks; otherwise two for each rank.
    config = replace(CONFIG, num_heads=4 * ranks, num_kv_heads=1 if few else 2 * ranks)
    kind, inner = name.split(".")[-2], 8 * ranks
    full = {"o_proj": (5, inner), "down_proj": (5, inner)}.get(kind, (inner, 5) if kind in DIMS else (5,))
    full = (2 * config.num_kv_heads, 5) if kind in ("k_proj", "v_proj") else full
    wanted = expected_shard(name, full, config, ranks, rank, sequence)
    return name, torch.Size(full), torch.Size(wanted.box.shape), sequence, wanted


def call_describe_shard(answer, group, parameter):
    name, full, own, sequence, _ = parameter
    return answer.describe_shard(name, full, own, group, sequence)


def describe_draw(number):
    heads = ", one key head in all" * (number // 2 % 2)
    return f"{NAMES[number // 4]}.weight, sequence_parallel={bool(number % 2)}{heads}"


DESCRIBE = Declaration(
    inputs={"parameter": Drawn(described, {describe_draw(number): number for number in range(4 * len(NAMES))})},
    call=call_describe_shard,
    reference=lambda ranks, rank: ranks[rank]["parameter"][-1],
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any batch, tokens, layout and number of ranks, in float64 and float32; in groups of only some ranks."""
    for declaration in (GATHER, REDUCE):
        # One rank alone may return what it was given.
        check_conditions(replace(declaration, shares=world.size == 1), answer, world, network)
    check_conditions(DESCRIBE, answer, world, network)
