"""The trainer: any number of ranks matches one process, data weights, and errors that are raised on all ranks."""

import json
import math

import pytest
import torch

from minidist.comm import World, bind
from minidist.config import Config, OptimConfig, PrecisionConfig
from minidist.data.loader import Loader
from minidist.errors import RunError, UserError
from minidist.learning_rate import learning_rate
from minidist.mesh import Mesh
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallelize import DEFAULT_GROUP_SPECS, parallelize
from minidist.tools.launch import RankFailure
from minidist.train.engine import Engine
from tests.helpers.small_run import small_config, train_small, with_changes, write_text


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


# Float32 sums in another order: a loss differs by a few roundings of 6e-8, and SGD carries the difference of each
# gradient (1e-6 of its size) into the parameters, for six steps of at most 0.5.
TOLERANCE = 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_losses_of_several_ranks_match_one_rank(ranks, tmp_path, text, size):
    train_small(World.single(), small_config(tmp_path / "one", text, train__eval_every=3))
    summaries = ranks(train_small, size, small_config(tmp_path / "many", text, train__eval_every=3))
    one, many = read_losses(tmp_path / "one"), read_losses(tmp_path / "many")
    assert len(one) == 6 and one[-1] < one[0] - 0.5
    assert many == pytest.approx(one, rel=TOLERANCE)
    held = [
        [row["held_out_loss"] for row in read_metrics(tmp_path / f) if "held_out_loss" in row] for f in ("one", "many")
    ]
    assert len(held[0]) == 2 and held[1] == pytest.approx(held[0], rel=TOLERANCE)
    assert all(summary["held_out_loss"] == held[1][-1] for summary in summaries)
    # Other masks alone would be seen a hundred times over.
    train_small(World.single(), small_config(tmp_path / "other", text, model__dropout=0.0))
    assert abs(read_losses(tmp_path / "other")[-1] - one[-1]) > 100 * TOLERANCE * one[-1]


def test_uneven_shares_do_not_change_the_losses(ranks, tmp_path, text):
    config = small_config(tmp_path / "even", text)
    ranks(train_small, 2, config)
    ranks(train_small, 2, with_changes(config, folder=tmp_path / "uneven", data__shares=(3.0, 1.0)))
    assert read_losses(tmp_path / "uneven") == pytest.approx(read_losses(tmp_path / "even"), rel=TOLERANCE)


def test_shares_and_weights_select_samples(ranks, tmp_path, text):
    """The mean loss of a step is that of 9 samples of rank 0 and 3 of rank 1, each seen alone by a weight of 0."""
    config = small_config(tmp_path / "both", text, train__steps=1)
    ranks(train_small, 2, config)
    cut = with_changes(config, data__shares=(3.0, 1.0))
    ranks(train_small, 2, with_changes(cut, folder=tmp_path / "first", data__weights=(2.0, 0.0)))
    ranks(train_small, 2, with_changes(cut, folder=tmp_path / "second", data__weights=(0.0, 2.0)))
    (both,), (first,), (second,) = (read_losses(tmp_path / name) for name in ("both", "first", "second"))
    assert abs(first - second) > 100 * TOLERANCE
    assert (9 * first + 3 * second) / 12 == pytest.approx(both, rel=1e-6)  # float32 sums
    assert (first + second) / 2 != pytest.approx(both, rel=1e-6)


def test_the_metrics_file_has_steps_tokens_rates_and_bytes(ranks, tmp_path, text):
    ranks(train_small, 2, small_config(tmp_path / "run", text))
    first, *rows = read_metrics(tmp_path / "run")
    assert first["start"] == 0 and first["ranks"] == 2 and len(first["corpus"]) == 64
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in steps] == [12 * 16 * n for n in range(1, 7)]
    assert all(row["tokens_per_s"] == pytest.approx(12 * 16 / row["step_time_s"]) for row in steps)
    optim = small_config(tmp_path, text).optim
    assert [row["lr"] for row in steps] == [learning_rate(optim, step, 6) for step in range(6)]
    # One all-reduce of the gradients in float32 and little else: between two ranks a ring sends each byte once.
    parameters = small_config(tmp_path, text).model.num_parameters()
    assert all(4 * parameters <= row["comm_bytes"] <= 4 * parameters + 400 for row in steps)
    assert all(row["memory"] > 50e6 and row["grad_norm"] > 0 and "mfu" not in row for row in steps)


def weighted_update(world, weights, optim):
    """One step of the engine in float64 with w_i; returns loss and parameters."""
    config = with_changes(Config(), model=MODEL, optim=optim)
    model = Transformer(MODEL).to(torch.float64)
    init_parameters(model, 0)
    groups = bind(world, Mesh(dp=world.size), DEFAULT_GROUP_SPECS)
    engine = Engine(parallelize(model, groups, config), groups, optim, SEED)
    batches = LOADER.micro_batches(0, 7, world.rank, world.size, 2)
    result = engine.step(0, batches, 0.1, data_weight=weights[world.rank])
    return result.loss, result.num_tokens, {name: p.detach().clone() for name, p in engine.parameters.items()}


MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, dropout=0.1
)
SEED = 3
LOADER = Loader(torch.arange(2000).numpy() * 7 % 31, 12, 0, min_length=3)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 1.0), (0.0, 1.0, 3.0)])
def test_data_weights_follow_the_update_rule(ranks, weights):
    """theta <- theta - lr sum_i w_i grad_i / sum_i w_i n_i: grad_i of the loss sum of rank i, which has n_i tokens."""
    optim = OptimConfig(kind="sgd", clip_norm=None, weight_decay=0.0)
    by_rank = ranks(weighted_update, 3, weights, optim)
    model = Transformer(MODEL).to(torch.float64)
    init_parameters(model, 0)
    total, count = 0.0, 0.0
    for rank, weight in enumerate(weights):
        for batch in LOADER.micro_batches(0, 7, rank, 3, 1):
            address = DropoutAddress(SEED, 0, batch.samples, torch.arange(12))
            loss_sum, tokens = model(batch.tokens, batch.labels, address=address)
            total, count = total + weight * loss_sum, count + weight * float(tokens)
    (total / count).backward()
    for loss, tokens, parameters in by_rank:
        assert tokens == count and loss == pytest.approx((total / count).item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            # Sums of some thousand terms in float64: 1e-16 each, grown by their number at worst.
            torch.testing.assert_close(parameters[name], parameter.detach() - 0.1 * parameter.grad, rtol=0, atol=1e-12)


def test_a_loss_that_is_not_finite_ends_the_run_and_says_what_to_do(server, tmp_path, text):
    config = small_config(tmp_path / "run", text, optim__lr=1e38, optim__clip_norm=None, checkpoint__every=1)
    with pytest.raises(RunError, match=r"^step \d: the (loss of ranks 0-1|reduced gradient) is not finite") as caught:
        server.run(train_small, 2, (config,), deadline_s=60)
    assert not isinstance(caught.value, RankFailure)
    message = str(caught.value)
    assert "No parameter was updated. Lower --optim.lr" in message and "The last checkpoint is" in message


@pytest.mark.parametrize("stage", [0, 3])
def test_repeated_overflows_end_the_run(server, tmp_path, text, stage):
    """A scale of 1e30 takes every gradient in fp16 beyond 65504, and stays too large for four steps."""
    precision = PrecisionConfig("fp16", initial_scale=1e30, max_overflows=4)
    config = small_config(tmp_path / "run", text, precision=precision, zero__stage=stage, checkpoint__every=1)
    with pytest.raises(RunError, match=r"^step 4: gradients overflowed in 4 steps one after another") as caught:
        server.run(train_small, 2, (config,), deadline_s=60)
    message = str(caught.value)
    assert "at loss scales 1e+30, 5e+29, 2.5e+29, 1.25e+29; in the last, these were not finite: model.embed" in message
    assert "Steps 1 to 4 updated nothing." in message and "The last checkpoint is" in message


def test_a_run_continues_after_an_overflow_at_half_the_scale(server, tmp_path, text):
    """Skipped steps are logged with their loss scale, without a gradient norm."""
    precision = PrecisionConfig("fp16", initial_scale=2.0**24)
    config = small_config(tmp_path / "run", text, precision=precision, train__steps=12)
    server.run(train_small, 1, (config,), deadline_s=60)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss_scale" in row]
    skipped = [row for row in logged if row["overflow"]]
    assert 0 < len(skipped) < len(logged) == 12
    assert logged[-1]["loss_scale"] == 2.0 ** (24 - len(skipped)) and not logged[-1]["overflow"]
    assert all((row["grad_norm"] is None) == row["overflow"] for row in logged)


def fail_on_one(world, config, rank, changes):
    """The error message of each rank if one rank has a different configuration."""
    try:
        train_small(world, with_changes(config, **changes) if world.rank == rank else config)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_data_file_on_one_rank_raises_on_all(ranks, tmp_path, text, rank):
    config = small_config(tmp_path / "run", text)
    by_rank = ranks(fail_on_one, 2, config, rank, {"data__path": tmp_path / "no.txt"})
    assert by_rank[0] == by_rank[1] and by_rank[0].startswith(
        f"rank {rank}: --data.path {tmp_path}/no.txt does not exist"
    )


def test_a_run_folder_that_rank_0_cannot_create_raises_on_all(ranks, tmp_path, text):
    config = small_config(tmp_path / "run", text)
    by_rank = ranks(fail_on_one, 2, config, 0, {"folder": text / "run"})
    assert by_rank[0] == by_rank[1] and "cannot be made: Not a directory" in by_rank[0]


def test_different_texts_on_two_ranks_are_refused(ranks, tmp_path, text):
    config = small_config(tmp_path / "run", text)
    by_rank = ranks(fail_on_one, 3, config, 2, {"data__path": write_text(tmp_path, seed=1)})
    assert by_rank[0] == by_rank[1] == by_rank[2] and "different texts: rank 0 text-0.txt" in by_rank[0]
    assert "rank 2 text-1.txt" in by_rank[0]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="256 different tokens, the model 64: give --model.vocab-size 256 or more"):
        train_small(World.single(), small_config(tmp_path / "run", text, model__vocab_size=64))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=4, min_lr_fraction=0.1, decay_fraction=0.25)
    rates = [learning_rate(optim, step, 40) for step in range(40)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and rates[4] == 1.0
    if schedule == "constant":
        assert rates[4:] == [1.0] * 36
    elif schedule == "wsd":
        assert rates[4:30] == [1.0] * 26 and rates[34] == pytest.approx(0.55) and rates[39] == pytest.approx(0.1)
    else:
        assert rates[22] == pytest.approx(0.55)
        assert rates[39] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 35 / 36)))
        assert rates[4:] == sorted(rates[4:], reverse=True)
