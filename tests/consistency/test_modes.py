"""The modes of consistency against synchronous training, each other and a plain loop; resume, and bad input."""

import collections
import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from minidist.comm import Meter, World, bind
from minidist.comm.group_specs import GroupSpec
from minidist.config import OptimConfig
from minidist.consistency.merge import mix_with_neighbours, mixing_fractions
from minidist.data.corpus import open_corpus
from minidist.data.loader import Loader
from minidist.errors import UserError
from minidist.learning_rate import learning_rate
from minidist.mesh import Mesh
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import group_specs, parallelize
from minidist.tools.config_warnings import find_warnings, validate_options
from minidist.tools.console.lines import describe_models
from minidist.tools.estimate.estimate import estimate
from minidist.train.engine import Engine
from minidist.validation import validate
from tests.helpers.consistency_runs import (
    ADAMW,
    SGD,
    WEIGHTED,
    assert_equal_parameters,
    load_parameters,
    make_config,
    train,
)
from tests.helpers.int8_reference import reduce_with_feedback
from tests.helpers.small_run import (
    read_checkpoint,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    with_resume,
    write_text,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


# -- equalities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, WEIGHTED], ids=["even", "weighted"])
def test_local_sgd_with_one_step_is_synchronous_training(ranks, tmp_path, text, more):
    expected = train(ranks, 3, make_config(tmp_path / "synchronous", text, **more))
    local = {"consistency__mode": "local", "consistency__h": 1} | more
    assert_equal_parameters(train(ranks, 3, make_config(tmp_path / "local", text, **local)), expected)
    other = train(ranks, 3, make_config(tmp_path / "other", text, **local | {"consistency__h": 2}))
    assert any(not torch.allclose(other[name], expected[name], rtol=1e-6) for name in expected)


@pytest.mark.parametrize("size, root", [(1, 0), (2, 1), (3, 0)])
def test_a_central_server_is_synchronous_training(ranks, tmp_path, text, size, root):
    """With AdamW, clipping and momentum on the server only; its checkpoint resumes on it."""
    expected = train(ranks, size, make_config(tmp_path / "synchronous", text, optim=ADAMW))
    config = make_config(tmp_path / "central", text, optim=ADAMW, consistency__mode="central", consistency__server=root)
    assert_equal_parameters(train(ranks, size, config), expected)
    again = with_resume(config, config.folder / "checkpoints" / "step-00000004", folder=tmp_path / "again")
    assert_equal_parameters(train(ranks, size, again), expected, rtol=0, atol=1e-12)


def test_diloco_with_outer_rate_1_and_no_momentum_is_local_averaging(ranks, tmp_path, text):
    local = {"optim": ADAMW, "consistency__mode": "local", "consistency__h": 3}
    expected = train(ranks, 2, make_config(tmp_path / "local", text, **local))
    outer = {"consistency__mode": "diloco", "consistency__outer_lr": 1.0, "consistency__outer_momentum": 0.0}
    assert_equal_parameters(train(ranks, 2, make_config(tmp_path / "diloco", text, **local | outer)), expected)


def test_one_replica_without_outer_momentum_is_one_process(ranks, tmp_path, text):
    expected = train(ranks, 1, make_config(tmp_path / "one", text, optim=ADAMW))
    for mode, size in (("local", 1), ("gossip", 1), ("local", 2)):
        how = {"consistency__mode": mode, "consistency__h": 2, "consistency__replicas": 1}
        assert_equal_parameters(
            train(ranks, size, make_config(tmp_path / f"{mode}-{size}", text, optim=ADAMW, **how)), expected
        )


def plain_loop(config, replicas, merge, reset_every=None):
    """Replicas in one process, with torch's optimizers: returns their parameters.

    merge: changes the models. reset_every: steps after which the optimizers are new ones; None: never.
    """
    corpus = open_corpus(config.data.source, config.data.path, config.data.seq_len)
    loader = Loader(corpus.train, config.data.seq_len, config.train.seed, min_length=config.data.min_length)
    model = Transformer(config.model)
    init_parameters(model, config.train.seed)
    dtype = torch.float64 if config.precision.policy == "fp64" else torch.float32
    models = [copy.deepcopy(model).to(dtype) for _ in range(replicas)]
    kinds = {"sgd": lambda p: torch.optim.SGD(p, 1.0), "adamw": lambda p: torch.optim.AdamW(p, 1.0, (0.9, 0.95))}
    optimizers = [kinds[config.optim.kind](each.parameters()) for each in models]
    batch, tokens = config.train.global_batch, [0] * replicas
    for step in range(config.train.steps):
        for at, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            [part] = loader.micro_batches(step * batch, batch, at, replicas, 1)
            loss, count = each(part.tokens, part.labels)
            optimizer.zero_grad()
            (loss / count).backward()
            if config.optim.clip_norm:
                torch.nn.utils.clip_grad_norm_(each.parameters(), config.optim.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optim, step, config.train.steps)
                group["weight_decay"] = config.optim.weight_decay
            optimizer.step()
            tokens[at] += int(count)
        merge(step, models, tokens)
        if reset_every and (step + 1) % reset_every == 0:
            for optimizer in optimizers:
                optimizer.state.clear()
    return [dict(each.named_parameters()) for each in models]


@pytest.mark.parametrize("size", [2, 3])
def test_diloco_is_the_plain_loop(ranks, tmp_path, text, size):
    """AdamW inside, Nesterov SGD of torch outside, numpy's weighted average; the weights are the tokens of a round."""
    how = {"optim": ADAMW, "model__dropout": 0.0, "consistency__mode": "diloco", "consistency__h": 3}
    how |= {"consistency__outer_lr": 0.7, "consistency__outer_momentum": 0.9}
    config = make_config(tmp_path / "run", text, **how)
    outer, optimizer = [], None

    def merge(step, models, tokens):
        nonlocal optimizer
        if not outer:
            start = Transformer(config.model)
            init_parameters(start, config.train.seed)
            outer.extend(torch.nn.Parameter(p.detach().double()) for p in start.parameters())
            optimizer = torch.optim.SGD(outer, 0.7, momentum=0.9, nesterov=True)
        if (step + 1) % 3:
            return
        for i, parameter in enumerate(outer):
            replicas = [list(model.parameters())[i].detach().numpy() for model in models]
            parameter.grad = parameter.detach() - torch.from_numpy(np.average(replicas, axis=0, weights=tokens))
        optimizer.step()
        for model in models:
            for mine, theirs in zip(model.parameters(), outer, strict=True):
                mine.data.copy_(theirs)
        tokens[:] = [0] * len(models)

    expected = plain_loop(config, size, merge)[0]
    assert_equal_parameters(
        train(ranks, size, config), {name: p.detach() for name, p in expected.items()}, rtol=1e-10, atol=1e-12
    )


def test_fragments_are_merged_one_after_the_other(ranks, tmp_path, text):
    """The plain loop again: layer 0 after steps 2, 4 and 6, the rest half a round earlier and after the last step."""
    how = {"optim": ADAMW, "model__dropout": 0.0, "model__num_layers": 2, "consistency__mode": "diloco"}
    how |= {"consistency__outer_lr": 0.7, "consistency__outer_momentum": 0.9}
    config = make_config(tmp_path / "run", text, consistency__h=2, consistency__fragments=2, **how)
    start = Transformer(config.model)
    init_parameters(start, config.train.seed)
    outer = {name: torch.nn.Parameter(p.detach().double()) for name, p in start.named_parameters()}
    fragments = [{n for n in outer if n.startswith("model.layers.0.")}, set()]
    fragments[1] = outer.keys() - fragments[0]
    optimizers = [torch.optim.SGD([outer[n] for n in names], 0.7, momentum=0.9, nesterov=True) for names in fragments]
    merged_at, tokens_before = [(1, 3, 5), (0, 2, 4, 5)], [[0] * 3, [0] * 3]

    def merge(step, models, tokens):
        replicas = [dict(model.named_parameters()) for model in models]
        for fragment, names in enumerate(fragments):
            if step not in merged_at[fragment]:
                continue
            weights = np.subtract(tokens, tokens_before[fragment])
            tokens_before[fragment] = list(tokens)
            for name in names:
                mean = np.average([replica[name].detach().numpy() for replica in replicas], axis=0, weights=weights)
                outer[name].grad = outer[name].detach() - torch.from_numpy(mean)
            optimizers[fragment].step()
            for replica in replicas:
                for name in names:
                    replica[name].data.copy_(outer[name].detach())

    expected = {name: p.detach() for name, p in plain_loop(config, 3, merge)[0].items()}
    assert_equal_parameters(train(ranks, 3, config), expected, rtol=1e-10, atol=1e-12)


def test_moments_begin_anew_after_a_merge_if_asked(ranks, tmp_path, text):
    """One replica, whose merge changes nothing, equals AdamW that is made anew every two steps."""
    how = {"optim": ADAMW, "model__dropout": 0.0, "consistency__mode": "local", "consistency__h": 2}
    kept = train(ranks, 1, make_config(tmp_path / "kept", text, **how))
    config = make_config(tmp_path / "reset", text, consistency__reset_moments=True, **how)
    expected = plain_loop(config, 1, lambda step, models, tokens: None, reset_every=2)[0]
    expected = {name: p.detach() for name, p in expected.items()}
    assert_equal_parameters(train(ranks, 1, config), expected, rtol=1e-10, atol=1e-12)
    assert any(not torch.allclose(kept[name], expected[name], rtol=1e-4) for name in kept)


def test_quantized_differences_are_averaged_as_a_plain_loop_does(ranks, tmp_path, text):
    """Three rounds in numpy: what a replica's int8 numbers leave out is added to its next difference."""
    how = {"optim": ADAMW, "model__dropout": 0.0, "consistency__mode": "diloco", "consistency__h": 2}
    how |= {"consistency__exchange": "int8", "consistency__outer_lr": 0.8, "consistency__outer_momentum": 0.5}
    config = make_config(tmp_path / "run", text, **how)
    start = Transformer(config.model)
    init_parameters(start, config.train.seed)
    outer = torch.nn.utils.parameters_to_vector(start.parameters()).detach().double().numpy()
    velocity, errors = np.zeros_like(outer), np.zeros((3, outer.size))

    def merge(step, models, tokens):
        nonlocal outer, velocity, errors
        if (step + 1) % 2:
            return
        flat = np.array([torch.nn.utils.parameters_to_vector(each.parameters()).detach().numpy() for each in models])
        shares = np.array(tokens)[:, None] / sum(tokens)
        gradient, errors = reduce_with_feedback(shares * (outer - flat), errors)
        velocity = 0.5 * velocity + gradient
        outer = outer - 0.8 * (gradient + 0.5 * velocity)
        for model in models:
            torch.nn.utils.vector_to_parameters(torch.from_numpy(outer.copy()), model.parameters())
        tokens[:] = [0] * len(models)

    expected = {name: p.detach() for name, p in plain_loop(config, 3, merge)[0].items()}
    assert_equal_parameters(train(ranks, 3, config), expected, rtol=1e-9, atol=1e-11)


def test_forgotten_progress_is_not_sent(text):
    """A replica that has begun with the state of another one must not send that replica's tokens and errors again."""
    config = small_config(None, text, consistency__mode="diloco", consistency__h=1, consistency__exchange="int8")
    groups = bind(World.single(), config.mesh_of(1), group_specs(config.mesh_of(1), config), meter=Meter())
    engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
    loader = Loader(np.arange(2000) % 31, config.data.seq_len, 1)
    engine.step(0, loader.micro_batches(0, 12, 0, 1, config.train.micro_batches), 0.1)
    engine.merger.tokens += 5
    assert any(error.any() for _, error in engine.merger.quantization_errors())
    engine.merger.forget_progress()
    assert not any(error.any() for _, error in engine.merger.quantization_errors()) and not engine.merger.tokens.any()


def torch_averaged(world, config):
    """Local SGD with torch's model averager, in float32."""
    corpus = open_corpus(config.data.source, config.data.path, config.data.seq_len)
    loader = Loader(corpus.train, config.data.seq_len, config.train.seed)
    model = Transformer(config.model)
    init_parameters(model, config.train.seed)
    optimizer = torch.optim.SGD(model.parameters(), config.optim.lr)
    averager, losses = PeriodicModelAverager(period=config.consistency.h, warmup_steps=config.consistency.h - 1), []
    batch = config.train.global_batch
    for step in range(config.train.steps):
        [part] = loader.micro_batches(step * batch, batch, world.rank, world.size, 1)
        loss, count = model(part.tokens, part.labels)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        losses.append(float(loss / count))
    return {name: p.detach() for name, p in model.named_parameters()}


def test_local_sgd_is_that_of_torch_in_float32(ranks, tmp_path, text):
    constant = OptimConfig(kind="sgd", lr=0.1, weight_decay=0.0, clip_norm=None, schedule="constant", warmup_steps=0)
    config = make_config(
        tmp_path / "run", text, optim=constant, precision__policy="fp32", model__dropout=0.0, data__min_length=None,
        train__micro_batches=1, consistency__mode="local", consistency__h=2,
    )  # fmt: skip
    expected = ranks(torch_averaged, 2, config)[0]
    assert_equal_parameters(train(ranks, 2, config), expected, rtol=1e-6, atol=1e-6)


def mixing_matrix(weights):
    """Gossip's mixing matrix on a ring, (replicas, replicas): a weight over the larger of two replicas' sums."""
    size = len(weights)
    near = [{at, (at - 1) % size, (at + 1) % size} for at in range(size)]
    around = [sum(weights[i] for i in each) for each in near]
    matrix = np.zeros((size, size))
    for i in range(size):
        for j in near[i] - {i}:
            matrix[i, j] = weights[j] / max(around[i], around[j])
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


def mix_repeatedly(world, values, weights, merges):
    """This rank's values after many merges of gossip on a ring of all ranks."""
    mesh = Mesh(dp=world.size)
    groups, flat = bind(world, mesh, [GroupSpec("outer", ("dp",))]), torch.tensor([values[world.rank]])

    def neighbours_of(replica):
        return sorted({(replica - 1) % world.size, (replica + 1) % world.size})

    for _ in range(merges):
        fractions = mixing_fractions(world.rank, weights, neighbours_of)
        flat = mix_with_neighbours(flat, fractions, neighbours_of(world.rank), groups["outer"])
    groups.destroy()
    return flat.item()


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 5.0), (1.0, 2.0, 3.0, 4.0, 5.0)])
def test_gossip_converges_to_the_weighted_mean(ranks, weights):
    """A plain average of neighbours converges to 2.346 in place of 2.25 with the first weights."""
    values = [float(i) for i in range(len(weights))]
    found = ranks(mix_repeatedly, len(weights), values, weights, 60)
    assert found == pytest.approx([np.average(values, weights=weights)] * len(weights), rel=1e-4)


@given(st.integers(1, 7), st.data())
def test_a_merge_of_gossip_conserves_the_weighted_sum(size, data):
    weights = data.draw(st.lists(st.integers(0, 9).map(float), min_size=size, max_size=size))

    def neighbours_of(replica):
        return sorted({(replica - 1) % size, (replica + 1) % size} - {replica})

    rows = [mixing_fractions(replica, weights, neighbours_of) for replica in range(size)]
    for replica, row in enumerate(rows):
        assert sum(row.values()) == pytest.approx(1.0) and min(row.values()) >= 0
        assert all(weights[other] or other == replica for other in row), "a replica without tokens counts"
    for giver in range(size):  # all that a replica gives makes up for what it takes
        received = sum(weights[taker] * row.get(giver, 0.0) for taker, row in enumerate(rows))
        assert received == pytest.approx(weights[giver])


def test_gossip_of_two_is_local_averaging(ranks, tmp_path, text):
    how = {"optim": ADAMW, "consistency__h": 2}
    expected = train(ranks, 2, make_config(tmp_path / "local", text, consistency__mode="local", **how))
    found = train(ranks, 2, make_config(tmp_path / "gossip", text, consistency__mode="gossip", **how))
    assert_equal_parameters(found, expected)


@pytest.mark.parametrize("topology, size", [("ring", 2), ("ring", 4), ("matching", 3)])
def test_gossip_averages_with_neighbours(ranks, tmp_path, text, topology, size):
    how = {"optim": SGD, "model__dropout": 0.0, "consistency__mode": "gossip", "consistency__h": 1}
    config = make_config(tmp_path / "run", text, consistency__topology=topology, **how)
    train(ranks, size, config)
    tensors = read_checkpoint(config.folder, 4)
    # A plain loop of mixing matrices; the pairs are those of the checkpoint before, found by trying.
    replicas = [load_parameters(config, 4, "params" if not i else f"replica-{i}.params") for i in range(size)]
    if topology == "ring":

        def merge(step, models, tokens):
            flat = [[p.detach().clone() for p in model.parameters()] for model in models]
            for at, model in enumerate(models):
                row = mixing_matrix(tokens)[at] if step < 5 else np.divide(tokens, sum(tokens))
                for i, parameter in enumerate(model.parameters()):
                    values = sum(fraction * flat[n][i] for n, fraction in enumerate(row))
                    parameter.data.copy_(values)
            tokens[:] = [0] * size

        shorter = with_changes(config, train__steps=6)
        expected = {name: p.detach() for name, p in plain_loop(shorter, size, merge)[0].items()}
        assert_equal_parameters(load_parameters(config), expected, rtol=1e-10, atol=1e-12)
        if size == 4:  # opposite replicas have not met
            assert not torch.equal(*[replicas[i]["model.embed_tokens.weight"] for i in (0, 2)])
    else:
        equal = [
            (i, j)
            for i in range(size)
            for j in range(i)
            if torch.equal(*[replicas[k]["model.norm.weight"] for k in (i, j)])
        ]
        assert len(equal) == 1, "one pair of three replicas"
    assert len([name for name in tensors if ".params/" in name]) % (size - 1) == 0


@pytest.mark.parametrize("mode, models", [("local", [3, 1, 3, 1]), ("gossip", [3, 3, 3, 1])])
def test_a_held_out_loss_says_of_how_many_models_it_is(ranks, tmp_path, text, mode, models):
    """After each step of 4, with merges after steps 2 and 4."""
    how = {"consistency__mode": mode, "consistency__h": 2, "train__steps": 4, "train__eval_every": 1}
    config = make_config(tmp_path / "run", text, **how)
    ranks(train_small, 3, config)
    rows = [row for row in read_metrics(config.folder) if "held_out_loss" in row]
    assert [row.get("held_out_models", 1) for row in rows] == models


def test_the_displayed_held_out_loss_of_replicas_is_called_their_mean():
    assert describe_models(1) == ""
    assert describe_models(3) == ", the mean of 3 replicas that differ, each on its part of the text"


# -- layouts inside a replica -----------------------------------------------------------------------------------------

INSIDE = {
    "dp": {},
    "zero 1": {"zero__stage": 1},
    "zero 3": {"zero__stage": 3},
    "tp": {"mesh__tp": 2, "parallel__sequence": True},
    "pp": {"mesh__pp": 2, "model__num_layers": 2, "model__tie_embeddings": True},
    "cp and zero 2": {"mesh__cp": 2, "zero__stage": 2},
}
IN_FRAGMENTS = ("zero 3", "tp", "pp")


@pytest.mark.parametrize("inside", INSIDE)
def test_a_replica_may_have_any_layout_inside(ranks, tmp_path, text, inside):
    """Two replicas of two ranks each equal two replicas of one rank."""
    how = {"optim": ADAMW, "consistency__mode": "diloco", "consistency__h": 2, "consistency__replicas": 2}
    how |= {"consistency__outer_momentum": 0.9}
    how |= {"model__num_layers": 2, "model__num_kv_heads": 2}
    expected = train(ranks, 2, make_config(tmp_path / "plain", text, **how))
    found = train(ranks, 4, make_config(tmp_path / "inside", text, **how | INSIDE[inside]))
    assert_equal_parameters(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("inside", IN_FRAGMENTS)
def test_a_replica_of_any_layout_may_be_merged_in_fragments(ranks, tmp_path, text, inside):
    how = {"optim": ADAMW, "consistency__mode": "local", "consistency__h": 3, "consistency__replicas": 2}
    how |= {"model__num_layers": 2, "model__num_kv_heads": 2, "consistency__fragments": 2}
    expected = train(ranks, 2, make_config(tmp_path / "plain", text, **how))
    found = train(ranks, 4, make_config(tmp_path / "inside", text, **how | INSIDE[inside]))
    assert_equal_parameters(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("exchange", ["full", "int8"])
def test_what_tensor_parallel_ranks_both_hold_is_merged_bit_for_bit(ranks, tmp_path, text, exchange):
    """Norms and a shared key head lie beside other shards on each rank; a digest after each step compares them."""
    how = {"optim": ADAMW, "consistency__mode": "diloco", "consistency__h": 2, "consistency__replicas": 2}
    how |= {"mesh__tp": 2, "consistency__exchange": exchange, "fault__digest_every": 1, "precision__policy": "fp32"}
    ranks(train_small, 4, make_config(tmp_path / "run", text, **how))  # raises if they differ


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, size, more",
    [
        ("local", 2, {"optim": ADAMW}),
        ("diloco", 3, {"optim": ADAMW}),
        ("diloco", 3, {"optim": ADAMW, "consistency__exchange": "int8"}),
        ("diloco", 4, {"optim": ADAMW, "zero__stage": 1, "consistency__replicas": 2}),
        ("gossip", 3, {"optim": SGD}),
        ("diloco", 2, {"optim": ADAMW, "model__num_layers": 2, "consistency__fragments": 2}),
    ],
)
def test_replicas_that_differ_resume_bit_for_bit(ranks, tmp_path, text, mode, size, more):
    """The checkpoint of step 4 lies between the merges after steps 3 and 6."""
    how = {"consistency__mode": mode, "consistency__h": 3} | more
    how |= {"consistency__outer_momentum": 0.9} if mode == "diloco" else {}
    config = make_config(tmp_path / "run", text, **how)
    ranks(train_small, size, config)
    again = with_resume(config, config.folder / "checkpoints" / "step-00000004", folder=tmp_path / "again")
    ranks(train_small, size, again)
    one, other = read_checkpoint(config.folder, 6), read_checkpoint(again.folder, 6)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    apart = read_checkpoint(config.folder, 4)
    differing = [n for n in apart if n.startswith("params/") and not torch.equal(apart[n], apart[f"replica-1.{n}"])]
    assert differing, "the replicas are equal between merges"
    assert all(torch.equal(one[n], one[f"replica-1.{n}"]) for n in one if n.startswith("params/"))


@pytest.mark.parametrize("engine", ["fast", "simple"])
def test_a_stop_between_merges_ends_the_run_two_checks_later(ranks, tmp_path, text, engine):
    """The stop is requested of one rank in the first step; the state between two merges is saved."""
    how = {"consistency__mode": "local", "consistency__h": 100, "train__steps": 100, "train__log_every": 100}
    config = make_config(tmp_path / "run", text, checkpoint__every=0, engine=engine, **how)
    summaries = ranks(train_until_stop_of_rank_1, 3, config)
    assert [summary["step"] for summary in summaries] == [2] * 3 and summaries[0]["stopped"]
    saved = read_checkpoint(config.folder, 2)
    assert not torch.equal(saved[name := min(n for n in saved if "params/" in n)], saved[f"replica-1.{name}"])


def train_until_stop_of_rank_1(world, config):
    return train_small(world, config, 1 if world.rank == 1 else None)


def refusal(world, config):
    try:
        return train_small(world, config)
    except UserError as error:
        return str(error)


def test_resume_refuses_another_number_of_replicas_and_another_mode(ranks, tmp_path, text):
    config = make_config(tmp_path / "run", text, consistency__mode="diloco", consistency__h=2)
    ranks(train_small, 2, config)
    again = with_resume(config, config.folder / "checkpoints" / "step-00000004", folder=tmp_path / "again")
    assert "has the state of 2 replicas, this run has 3: give --consistency.replicas 2" in ranks(refusal, 3, again)[0]
    other = with_changes(again, consistency__mode="gossip")
    assert "was trained with --consistency.mode diloco, this run has gossip" in ranks(refusal, 2, other)[0]
    other = with_changes(again, consistency__fragments=2, model__num_layers=2)
    expected = "was trained with --model.num-layers 1 --consistency.fragments 1, this run has 2, 2"
    assert expected in ranks(refusal, 2, other)[0]
    other = with_changes(again, consistency__exchange="int8")
    assert "was trained with --consistency.exchange full, this run has int8" in ranks(refusal, 2, other)[0]


# -- bytes ------------------------------------------------------------------------------------------------------------


def sent_bytes(world, config):
    """The bytes that this rank sends in a step without a merge and in the next one with it, by group."""
    mesh = config.mesh_of(world.size)
    groups = bind(world, mesh, group_specs(mesh, config), meter=Meter())
    engine = Engine(parallelize(Transformer(config.model), groups, config), groups, config.optim, seed=1)
    loader, at = Loader(np.arange(2000) % 31, config.data.seq_len, 1), mesh.coords(world.rank)["dp"]
    found = []
    for step in range(2):
        groups.meter.wire_bytes.clear()
        batch, train = config.train.global_batch, config.train
        engine.step(step, loader.micro_batches(step * batch, batch, at, mesh.dp, train.micro_batches), 0.1)
        found.append(collections.Counter({name: count for name, count in groups.meter.wire_bytes.items() if count}))
    groups.destroy()
    return found


def test_estimated_bytes_are_those_counted(ranks, text):
    """For every mode; in the layouts inside a replica too."""
    two = {"consistency__mode": "local", "consistency__h": 2, "consistency__replicas": 2, "model__num_layers": 2}
    cases = [
        {"consistency__mode": "central", "consistency__server": 2},
        {"consistency__mode": "diloco", "consistency__h": 2},
        {"consistency__mode": "diloco", "consistency__h": 2, "consistency__exchange": "int8"},
        {"consistency__mode": "gossip", "consistency__h": 2},
        {"consistency__mode": "gossip", "consistency__h": 2, "consistency__topology": "matching"},
        two | {"consistency__mode": "diloco", "consistency__exchange": "int8", "mesh__tp": 2},
        two | {"zero__stage": 1},
        two | {"mesh__tp": 2, "model__num_kv_heads": 2, "parallel__sequence": True},
        two | {"mesh__pp": 2, "precision__policy": "bf16"},
    ]
    for case in cases:
        config = small_config(None, text, train__steps=6, **case)
        for cost, found in zip(estimate(config, 4).ranks, ranks(sent_bytes, 4, config), strict=True):
            expected = collections.Counter({name: count for name, count in cost.wire_bytes.items() if count})
            merge = 0 if case["consistency__mode"] == "central" else 1
            assert found[0] == expected and bool(cost.replica_merge_bytes) == bool(merge), (case, cost.coords)
            assert found[1] == expected + collections.Counter(cost.replica_merge_bytes), (case, cost.coords)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, changes, message",
    [
        (4, {"mode": "local", "h": 7}, "h is 7, which does not divide the 600 steps: .* 595 or 602, or --con.*h 1"),
        (4, {"mode": "diloco", "h": 1000}, "does not divide the 600 steps: .* Give --train.steps 1000, or .*h 200"),
        (4, {"mode": "diloco", "replicas": 3}, "dp=4 ranks cannot be divided into as many equal .*replicas 1, 2, 4"),
        (4, {"h": 10}, "consistency.h 10 has no effect: consistency.mode is synchronous; .* Leave --consistency.h out"),
        (4, {"mode": "local", "h": 10, "outer_lr": 1.0}, "outer-lr 1.0 has no effect: consistency.mode is local"),
        (4, {"mode": "diloco", "h": 10, "topology": "matching"}, "topology matching has no effect: .* for gossip"),
        (4, {"mode": "central", "server": 4}, "consistency.server is 4, and the 4 ranks of mesh .* are 0 to 3: give"),
        (4, {"mode": "local", "h": 10, "exchange": "int8"}, "consistency.exchange int8 has no effect: .*is for diloco"),
        (4, {"mode": "local", "h": 1, "fragments": 2}, "1 layer, merged every 1 step. Give --consistency.fragments 1"),
        (4, {"mode": "diloco", "h": 10, "outer_momentum": 1.0}, "momentum is 1.0; it must be 0 or more and below 1"),
        (4, {"mode": "diloco", "h": 10, "outer_lr": 0.0}, "consistency.outer-lr is 0.0; it must be above 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(size, changes, message):
    config = with_changes(small_config(None, None), **{f"consistency__{name}": v for name, v in changes.items()})
    with pytest.raises(UserError, match=message):
        validate_options(with_changes(config, train__steps=600), size)


@pytest.mark.parametrize(
    "size, changes, warning",
    [
        (
            2,
            {"zero__stage": 1},
            "zero.stage 1 shards nothing here: each of the 2 replicas of .* local has dp x cp = 1",
        ),
        (
            4,
            {"mesh__pp": 4, "model__num_layers": 4},
            "mode local has one replica here, mesh pp=4 x dp=1 .*: it merges",
        ),
        (2, {"consistency__replicas": 1}, "one replica here .*: it merges nothing. Leave --consistency.replicas out"),
        (1, {"consistency__mode": "diloco"}, "mode diloco has one replica here, .*: its outer step is along this repl"),
    ],
)
def test_a_run_says_that_there_is_nothing_to_merge_or_to_shard(size, changes, warning):
    config = small_config(None, None, **{"consistency__mode": "local", "consistency__h": 3} | changes)
    [found] = find_warnings(config, validate_options(config, size))
    assert re.search(warning, found), found


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"zero__stage": 1}, "zero.stage 1 and .* Give --mesh.dp 2 alone .* makes every rank the server of a shard"),
        ({"mesh__pp": 2, "model__num_layers": 2}, "has the whole model on one server, in one dtype: mesh pp=2"),
        ({"precision__policy": "bf16"}, "precision.policy bf16 do not fit"),
        ({"comm__algorithm": "ring"}, "leave --comm.algorithm and --comm.gradients out"),
    ],
)
def test_central_refuses_what_it_cannot_do(changes, message):
    with pytest.raises(UserError, match=message):
        validate(small_config(None, None, consistency__mode="central", **changes), 2)


def test_live_recovery_needs_steps_in_common():
    with pytest.raises(UserError, match="in consistency.mode stale ranks have no step in common: leave --fault.live"):
        validate(small_config(None, None, consistency__mode="stale", fault__live_recovery=True), 2)


def test_tied_embeddings_of_many_replicas_of_a_pipeline_are_refused():
    local = {"consistency__mode": "local", "consistency__h": 6}
    config = small_config(None, None, mesh__pp=2, model__num_layers=2, model__tie_embeddings=True, **local)
    validate(config, 4)
    with pytest.raises(UserError, match="merges 3 replicas, .* give --model.no-tie-embeddings"):
        validate(config, 6)
