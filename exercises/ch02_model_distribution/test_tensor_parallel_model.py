"""Tests of tensor_parallel_model: the reference is the unsharded model on one process, in float64."""

from dataclasses import replace

import torch
from torch import nn

from exercises.testing import Wrong, expect, test
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer

LENGTH, BATCH = 12, 2
TOLERANCE = 1e-12  # sums of a few hundred terms of about 1e-2, in float64 in another order
CONFIG = ModelConfig(24, 24, 24, 2, 12, 12, 16, tie_embeddings=False)
# The dimension along which a weight is sharded; norms are replicated.
DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
DIMS |= {"embed_tokens": 0, "lm_head": 0}
LOSS_SHAPES = ((BATCH, LENGTH), (2, BATCH, LENGTH))  # all-reduced by the loss: no features


def model_of(config):
    """Return the unsharded model, equal on all ranks; its norms are not all ones, so that a missing norm shows."""
    model = Transformer(config).double()
    init_parameters(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


def batch(salt=5):
    """Return tokens and labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(salt)
    return [torch.randint(24, (BATCH, LENGTH), generator=generator) for _ in range(2)]


def heads_group(network, group, kv_heads):
    """Return the ranks of `group` that hold the key and value heads of this rank; None if it is the only one."""
    if kv_heads >= group.size:
        return None
    return group if kv_heads == 1 else network.pair_group  # two heads on four ranks


def sharded(answer, network, group, sequence, config=CONFIG):
    """Shard the model with the answer; return it."""
    model = model_of(config)
    answer.apply_tensor_parallel(model, group, heads_group(network, group, config.num_kv_heads), sequence)
    return model


def groups_of(world, network):
    """Return the group of all ranks and, on 4 ranks, this rank's group of every other rank."""
    return [network.group, *([network.divided_group] if world.size == 4 else [])]


def case_of(group, sequence, config=CONFIG):
    """Describe a model and how it is sharded, for the message."""
    how = "sequence parallelism" if sequence else "tensor parallelism only"
    tied = ", tied embedding" if config.tie_embeddings else ""
    return f"{how}, {group.size} ranks, {config.num_kv_heads} key and value heads{tied}"


def kv_heads_of(size):
    """Return numbers of key and value heads: one for all ranks, one for some of them, one or more for each."""
    return {1: (3, 12), 2: (1, 2, 12), 3: (1, 3, 6), 4: (1, 2, 4, 12)}[size]


def shard_of(name, full, group, config):
    """Return this rank's shard of a full weight or gradient: of its own query heads, features or tokens."""
    kind = name.split(".")[-2]
    if kind not in DIMS:
        return full
    size = full.shape[DIMS[kind]] // group.size
    start = group.rank * size
    if kind in ("k_proj", "v_proj"):
        own = range(group.rank * config.num_heads // group.size, (group.rank + 1) * config.num_heads // group.size)
        heads = [head * config.num_kv_heads // config.num_heads for head in own]
        width = full.shape[0] // config.num_kv_heads
        start, size = heads[0] * width, (heads[-1] - heads[0] + 1) * width
    return full.narrow(DIMS[kind], start, size)


def gradients_are_right(answer, network, group, sequence, config, is_compared, backwards=1):
    """Compare the gradients of the selected parameters, after some backwards, with those of one process."""
    model, one, case = (
        sharded(answer, network, group, sequence, config),
        model_of(config),
        case_of(group, sequence, config),
    )
    expect("shape of lm_head.weight", list(model.lm_head.weight.shape), [24 // group.size, 24], case=case)
    case += ", gradients of two backwards" * (backwards > 1)
    for salt in range(backwards):
        model(*batch(salt))[0].backward()
        one(*batch(salt))[0].backward()
    parameters = dict(model.named_parameters())
    for name, full in one.named_parameters():
        if is_compared(name):
            if parameters[name].grad is None:
                raise Wrong("wrong", f"the gradient of {name}", "a tensor", "None", case=case)
            wanted = shard_of(name, full.grad, group, config)
            expect(f"the gradient of {name}", parameters[name].grad, wanted, case=case, tolerance=TOLERANCE)


@test(points=3, ranks=(1, 2, 3, 4))
def loss_is_that_of_one_process(answer, world, network):
    """Every rank has the loss of the unsharded model and its number of labels; its logits are its part of them."""
    with torch.no_grad():
        expected, number, logits = *model_of(CONFIG)(*batch()), model_of(CONFIG)(batch()[0])
    for group in groups_of(world, network):
        for sequence in (False, True):
            model, case = sharded(answer, network, group, sequence), case_of(group, sequence)
            loss, count = model(*batch())
            expect("the loss", loss, expected, case=case, tolerance=1e-11)  # of about 80
            expect("the number of labels", count, number, case=case)
            own, got = logits.chunk(group.size, -1)[group.rank], model(batch()[0])
            expect("this rank's logits", got, own, case=case, tolerance=TOLERANCE)
            loss, count = model.loss(got, batch()[1])
            expect("the result of model.loss for this rank's logits", loss, expected, case=case, tolerance=1e-11)
            expect("the number of labels of model.loss", count, number, case=case)


@test(points=2, ranks=(2, 3, 4))
def shards_of_all_parameters(answer, world, network):
    """The parameters keep their names; this rank has its shard of each."""
    for group in groups_of(world, network):
        for kv_heads in kv_heads_of(group.size):
            config = replace(CONFIG, num_kv_heads=kv_heads, tie_embeddings=kv_heads == 1)
            model, one, case = (
                sharded(answer, network, group, False, config),
                model_of(config),
                case_of(group, False, config),
            )
            found, wanted = dict(model.named_parameters()), dict(one.named_parameters())
            expect("names of the parameters", sorted(found), sorted(wanted), case=case)
            for name, full in wanted.items():
                own = shard_of(name, full.detach(), group, config)
                expect(f"this rank's shard of {name}", found[name].detach(), own, case=case)
            is_tied = model.lm_head.weight is model.model.embed_tokens.weight
            expect("whether embedding and head are one parameter", is_tied, config.tie_embeddings, case=case)


@test(points=4, ranks=(2, 3, 4))
def gradients_with_tensor_parallelism_only(answer, world, network):
    """All gradients are those of one process: also of the norms, which see all tokens, and of replicated key heads."""
    for group in groups_of(world, network):
        for index, kv_heads in enumerate(kv_heads_of(group.size)):
            config = replace(CONFIG, num_kv_heads=kv_heads, tie_embeddings=index % 2 == 0)
            gradients_are_right(answer, network, group, False, config, lambda name: True)


@test(points=3, ranks=(2, 3, 4))
def norms_with_sequence_parallelism(answer, world, network):
    """With sequence parallelism the gradient of every norm is summed over the ranks."""
    for group in groups_of(world, network):
        kv_heads = kv_heads_of(group.size)[1]  # on 4 ranks: two heads, each on a pair of ranks
        config = replace(CONFIG, num_kv_heads=kv_heads)
        gradients_are_right(answer, network, group, True, config, lambda name: "norm" in name)
        gradients_are_right(answer, network, group, True, config, lambda name: True, backwards=2)


@test(points=2, ranks=(2, 3, 4))
def other_gradients_with_sequence_parallelism(answer, world, network):
    """All other gradients are those of one process, too."""
    for group in groups_of(world, network):
        for kv_heads in kv_heads_of(group.size):
            config = replace(CONFIG, num_kv_heads=kv_heads, tie_embeddings=kv_heads == 1)
            gradients_are_right(answer, network, group, True, config, lambda name: "norm" not in name)


@test(points=2, ranks=(2, 4))
def replicas_are_equal_after_three_steps(answer, world, network):
    """Three steps of SGD give the parameters of one process, on every rank."""
    config = replace(CONFIG, num_kv_heads=1, tie_embeddings=True)
    for sequence in (False, True):
        model, one = sharded(answer, network, network.group, sequence, config), model_of(config)
        for each in (model, one):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(3):
                loss, count = each(*batch(step))
                optimizer.zero_grad()
                (loss / count).backward()
                optimizer.step()
        own, case = dict(model.named_parameters()), case_of(network.group, sequence, config)
        for name, full in one.named_parameters():
            wanted = shard_of(name, full.detach(), network.group, config)
            expect(f"{name} after three steps", own[name].detach(), wanted, case=case, tolerance=TOLERANCE)


@test(points=2, ranks=(2,))
def stages_of_a_pipeline(answer, world, network):
    """The part of a model that a pipeline stage holds is sharded; what another stage holds is left alone."""
    for sequence, tie in ((False, False), (True, False), (False, True), (True, True)):
        config = replace(CONFIG, num_layers=3, tie_embeddings=tie)
        case = case_of(network.group, sequence, config) + ", three pipeline stages"
        stages = first, between, last = [model_of(config) for _ in range(3)]
        for number, stage in enumerate(stages):
            for layer in {0, 1, 2} - {number}:
                stage.model.layers[layer] = nn.Identity()
        for stage in (first, between):
            stage.model.norm, stage.lm_head = nn.Identity(), nn.Identity()
        for stage in (between,) if tie else (between, last):  # a tied embedding is the head's weight, too
            stage.model.embed_tokens = nn.Identity()
        for stage in stages:
            left_out = [name for name, module in stage.named_modules() if isinstance(module, nn.Identity)]
            answer.apply_tensor_parallel(stage, network.group, None, sequence)
            names = [type(stage.get_submodule(name)).__name__ for name in left_out]
            expect("what another stage holds", names, ["Identity"] * len(names), case=case)
        tokens, labels = batch()
        hidden = first(tokens, layers=range(1))
        hidden = between(tokens, layers=range(1, 2), hidden=hidden)
        loss, _ = last(tokens, labels, layers=range(2, 3), hidden=hidden)
        one = model_of(config)
        expected, _ = one(tokens, labels)
        expect("the loss of three stages", loss, expected.detach(), case=case, tolerance=1e-11)
        loss.backward()
        expected.backward()
        found = [dict(stage.named_parameters()) for stage in stages]
        for name, full in one.named_parameters():  # two stages have a tied embedding, with partial gradients
            grads = [each[name].grad for each in found if name in each and each[name].grad is not None]
            wanted = shard_of(name, full.grad, network.group, config)
            what = f"the gradient of {name}" + ", summed over the stages" * ("embed" in name and tie)
            expect(what, sum(grads) if grads else None, wanted, case=case, tolerance=TOLERANCE)


@test(points=2, ranks=(2, 3))
def equal_bytes_and_fewer_tokens_per_norm(answer, world, network):
    """Each all-reduce becomes an all-gather and a reduce-scatter of equal bytes; a norm sees LENGTH / ranks tokens."""
    layers, seen, counts, sent = CONFIG.num_layers, {}, {}, {}
    for sequence in (False, True):
        model = sharded(answer, network, network.group, sequence)
        lengths, before = [], len(network.records)
        norms = [norm for each in model.model.layers for norm in (each.input_layernorm, each.post_attention_layernorm)]
        for norm in (*norms, model.model.norm):
            norm.register_forward_hook(lambda _, args, out, lengths=lengths: lengths.append(args[0].shape[1]))
        model(*batch())[0].backward()
        # Without those of the loss and of the gradients of norms, (h,): of activations, which have features.
        records = [one for one in network.records[before:] if len(one.shape) > 1 and one.shape not in LOSS_SHAPES]
        seen[sequence], counts[sequence] = lengths, len(records)
        sent[sequence] = sum(record.wire_bytes for record in records)
    case = f"{world.size} ranks"
    expect("tokens in each norm", seen[False], [LENGTH] * (2 * layers + 1), case=case)
    wanted = [LENGTH // world.size] * (2 * layers + 1)
    expect("tokens in each norm, with sequence parallelism", seen[True], wanted, case=case)
    # Of the embedding, the input of the head, and each attention and feed-forward layer, which have two.
    expect("collectives of activations", counts[False], 2 + 4 * layers, case=case)
    expect("collectives of activations, with sequence parallelism", counts[True], 2 * counts[False], case=case)
    expect("bytes sent with sequence parallelism", sent[True], sent[False], case=case)
