"""The solutions of chapter 02 train a model in a real run; messages about usual wrong answers."""

import importlib.util
import json
import re

import pytest
import torch
from torch import nn

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check, modules_to_preload
from exercises.learner_pieces import LearnerPiece
from exercises.network import Torchrun
from minidist.tools.launch import RankServer
from tests.helpers.small_run import small_config, train_small, write_text

EXERCISES = Catalogue()
TENSOR = ["tensor_parallel_block", "vocabulary_parallel", "tensor_parallel_model"]
# Exercises whose solutions train together with the simple engine, and its options.
TOGETHER = {
    "tensor": (TENSOR, {"mesh__tp": 2}),
    "sequence": (["region_operators", *TENSOR], {"mesh__tp": 2, "parallel__sequence": True}),
    "gpipe": (["gpipe_schedule", "pipeline_executor"], {"mesh__pp": 2, "parallel__schedule": "gpipe"}),
    "zero bubble": (
        ["one_f_one_b_schedule", "pipeline_executor", "split_backward"],
        {"mesh__pp": 2, "parallel__schedule": "zb-h1"},
    ),
    "ring": (["zigzag_positions", "ring_attention", "ring_attention_backward"], {"mesh__cp": 2}),
    "ulysses": (["zigzag_positions", "ulysses_attention"], {"mesh__cp": 2, "parallel__context": "ulysses"}),
}


def losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(name: str) -> LearnerPiece:
    exercise = EXERCISES[name]
    return LearnerPiece(name, exercise.pieces, "mine.py", exercise.solution.read_text())


@pytest.mark.parametrize("names, options", TOGETHER.values(), ids=TOGETHER)
def test_the_learners_pieces_train_the_model(ranks, tmp_path, names, options):
    """`train_with_pieces` fails if no rank calls one of them."""
    text = write_text(tmp_path)
    common = {"train__steps": 2, "train__micro_batches": 4, "model__num_layers": 4}
    ranks(train_small, 1, small_config(tmp_path / "alone", text, **common))
    config = small_config(tmp_path / "learner", text, engine="simple", **common, **options)
    ranks(train.train_with_pieces, 2, config, [piece(name) for name in names], names)
    one, mine = losses(tmp_path / "alone"), losses(tmp_path / "learner")
    assert len(one) == 2 and mine == pytest.approx(one, rel=1e-5)  # float32 sums in another order


@pytest.mark.exhaustive
@pytest.mark.parametrize("warm", [False, True], ids=["without operators", "with"])
def test_a_solution_passes_on_the_server_of_a_single_check(warm):
    """What an operator imports when it is first used is not taken for the answer's doing."""
    chosen = [one for one in EXERCISES.values() if one.chapter == "ch02_model_distribution"]
    chosen = [one for one in chosen if ("torch._dynamo" in modules_to_preload([one])) == warm]
    assert len(chosen) > 2
    with RankServer(preload=modules_to_preload(chosen)) as server:
        for exercise in chosen:
            [first, *_] = exercise.tests()
            [result] = check(exercise, exercise.solution, server, only=[first.id]).results
            assert result.finding is None, report.format_finding(result.finding)


# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("region_operators", "wrong_sums_both_ways"): (
        "gradients_are_those_of_one_process",
        [
            "the gradient of this rank's factor, at [0][0]",
            "  for       Region, 2 ranks, this is rank 0",
            "  rank      0 of 2",
            "  expected  [140.0, 357.0, 352.0, 345.0, 336.0]",
            "  got       [280.0, 714.0, 704.0, 690.0, 672.0]",
        ],
    ),
    ("vocabulary_parallel", "wrong_gathered"): (
        "logits_are_not_gathered",
        [
            "operations in forward",
            "  for       a vocabulary of 6 on 2 ranks",
            "  rank      0 of 2",
            "  expected  ['all_reduce']",
            "  got       ['all_gather', 'all_reduce']",
        ],
    ),
    ("one_f_one_b_schedule", "wrong_one_more"): (
        "few_micro_batches_in_flight",
        [
            "peak number of micro-batches in flight",
            "  for       stage 0 of 1, 2 micro-batches: F0 F1 B0 B1",
            "  expected  at most 1",
            "  got       2",
        ],
    ),
    ("stage_balance", "wrong_ends_do_not_count"): (
        "embedding_and_head_count",
        [
            "the cost of the costliest part",
            "  for       layers cost [1, 1, 1, 1, 1, 1, 1, 1], the embedding 0, the head 3: [(0, 4), (4, 8)]",
            "  expected  6.0",
            "  got       7.0",
        ],
    ),
    ("ring_attention_backward", "wrong_all_blocks_kept"): (
        "memory_of_one_block",
        [
            "peak memory, in tensors of the size of a rank's keys (196 kB)",
            "  for       ring_backward(grad=<(2, 3, 4, 1024) float64>, query=<(2, 3, 4, 1024) float64>, key=<(2, 3, 4, "
            "1024) floa ...",
            "  rank      0 of 6",
            "  expected  as on 3 ranks: 11.0",
            "  got       17.0 on 6 ranks",
        ],
    ),
    ("ulysses_attention", "wrong_once_per_head"): (
        "attends_once_to_whole_sequences",
        [
            "calls of attend",
            "  for       1 ranks, contiguous layout, 3 tokens each, 12 heads, 12 key heads",
            "  expected  1",
            "  got       12",
        ],
    ),
    ("wrong_second_step", "wrong_norm_only"): (
        "replicas_stay_equal",
        [
            "norms and shifts of rank 1 and of rank 0, at [0][1][0]",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert report.format_finding(result.finding)[: len(told)] == told


def last_loss(world, micro_batches, optimizer):
    """Train the faulty program of fast_pipeline on this many stages; return the loss of the last batch, rounded."""
    spec = importlib.util.spec_from_file_location("faulty", EXERCISES["fast_pipeline"].stub)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    if optimizer == "SGD":
        program.torch.optim.AdamW = lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(0)
    samples = torch.randn(120, 10)
    network = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(5)] + [nn.Linear(10, 10)]
    targets = samples.flip(1).sin()
    _, losses, _ = Torchrun(world)(program.main, samples, targets, network, epochs=2, micro_batches=micro_batches)
    return f"{losses[-1]:.4f}"


def test_the_table_of_symptoms_is_what_the_faulty_pipeline_gives(server):
    rows = re.findall(r"^ +(\d) +(\d+) +(0\.\d{4}) +(0\.\d{4})$", EXERCISES["fast_pipeline"].stub.read_text(), re.M)
    assert len(rows) == 7
    for stages, micro_batches, *expected in rows:
        if micro_batches != "2":  # three of the four kinds of rows
            arguments = [(int(micro_batches), optimizer) for optimizer in ("AdamW", "SGD")]
            found = [server.run(last_loss, int(stages), each, backend=None).values[-1] for each in arguments]
            assert found == expected, (stages, micro_batches)
