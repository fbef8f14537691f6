"""Answers of chapter 08 train a model; messages about wrong answers; the numbers of the debugging exercise."""

import importlib.util
import json
import math
import re

import pytest

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check
from exercises.learner_pieces import LearnerPiece
from exercises.network import Torchrun
from tests.helpers.small_run import small_config, train_small, write_text

EXERCISES = Catalogue()
# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("process_groups", "wrong_heads_strided"): (
        "few_key_value_heads",
        [
            'the groups of "heads"',
            "  for       mesh tp 4, 2 key-value heads",
            "  expected  [[0, 1], [2, 3]]",
            "  got       [[0, 2], [1, 3]]",
        ],
    ),
    ("process_groups", "wrong_grads_only_if_needed"): (
        "one_axis",
        [
            "the names of all specs, sorted",
            "  for       mesh of one rank",
            "  expected  ['grads']",
            "  got       []",
        ],
    ),
    ("tensor_specs", "wrong_embedding_by_name"): (
        "tensors_of_stages",
        [
            "the replicas in the spec of model.embed_tokens.weight",
            "  for       mesh pp 2",
            "  rank      0 of 2",
            "  expected  [0]",
            "  got       [0, 1]",
        ],
    ),
    ("tensor_specs", "wrong_shards_not_moved"): (
        "shards_of_sharded_parameters",
        [
            "the boxes in the spec of rows",
            "  for       rank 1 of mesh tp 2; its flat range is shard 0 of 1",
            "  expected  [[[4, 0], [8, 3]]]",
            "  got       [[[0, 0], [4, 3]]]",
        ],
    ),
    ("parallel_model", "wrong_shapes_after_the_split"): (
        "every_tensor_has_a_spec",
        [
            'the shape in specs["model.embed_tokens.weight"]',
            "  for       mesh pp=1 x dp=1 x cp=1 x tp=2, tied, one key-value head, frozen parameters, a buffer",
            "  rank      0 of 2",
            "  expected  [20, 16]",
            "  got       [10, 16]",
        ],
    ),
    ("training_step", "wrong_replicas_counted"): (
        "each_axis_trains",
        [
            "the gradient norm",
            "  for       data parallelism, the second data shard with weight 0.5; step 0",
            "  rank      0 of 2",
            "  expected  1.632480",
            "  got       2.308675",
        ],
    ),
    ("training_step", "wrong_every_rank_for_itself"): (
        "one_bad_rank_stops_all",
        [
            "the master of model.layers.0.input_layernorm.weight after a step that all ranks must skip, at [0]",
            "  for       dp=2, ZeRO stage 1; infinity in a gradient of rank 1 in step 1",
            "  rank      0 of 2",
            "  expected  0.480000",
            "  got       0.484411",
        ],
    ),
    ("training_run", "wrong_saved_before_the_digests"): (
        "everything_in_its_order",
        [
            "the next event",
            "  for       train.steps 7, checkpoint.every 3, digest_every 2, eval_every 3; after "
            "comparison of digests | step 3",
            "  expected  'comparison of digests'",
            "  got       'save of step-00000003'",
        ],
    ),
    ("training_run", "wrong_position_from_the_step"): (
        "resumed_run_is_the_same_run",
        [
            "the samples of this rank's steps",
            "  for       one rank took 2 steps of 12 samples; two go on with 7 samples per step",
            "  rank      0 of 2",
            "  expected  [[24, 25, 26, 27], [31, 32, 33, 34], [38, 39, 40, 41]]",
            "  got       [[14, 15, 16, 17], [21, 22, 23, 24], [28, 29, 30, 31]]",
        ],
    ),
    ("eight_ranks", "wrong_not_on_the_last_stage"): (
        "one_stage",
        [
            "the losses",
            "  for       pp 1 x dp 1 x tp 1, clip_norm 0.5, 4 steps, 2 micro-batches",
            "  expected  [2.614174, 2.180734, 1.828885, 1.668671]",
            "  got       [2.614174, 2.142250, 1.769421, 1.640767]",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert [round_numbers(line) for line in report.format_finding(result.finding)] == told


def round_numbers(line: str) -> str:
    """Round long decimal fractions to six digits: the others depend on the order of sums."""
    return re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6f}", line)


def train_as_in_the_table(world, mesh):
    """The losses in the columns of the table, and this rank's parameters as bytes, of the faulty program."""
    spec = importlib.util.spec_from_file_location("faulty", EXERCISES["eight_ranks"].stub)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    given = *program.make_samples(), program.make_model(world.rank), mesh
    losses, parameters = Torchrun(world)(program.main, *given, steps=16)
    bits = {name: parameter.numpy().tobytes() for name, parameter in parameters.items()}
    return [f"{losses[step - 1]:.4f}" for step in (1, 2, 4, 8, 16)], bits


def test_the_table_of_symptoms_is_what_the_faulty_program_gives(server):
    number = r" +(\d\.\d{4})"
    rows = re.findall(
        rf"^ +(one process|pp . x dp . x tp .){number * 5}$", EXERCISES["eight_ranks"].stub.read_text(), re.M
    )
    assert [mesh for mesh, *_ in rows] == ["one process"] + [
        f"pp {pp} x dp {dp} x tp {tp}" for pp, dp, tp in ((1, 4, 2), (2, 1, 1), (2, 2, 2), (4, 1, 1))
    ]
    for name, *expected in rows:
        mesh = tuple(map(int, re.findall(r"\d", name))) or (1, 1, 1)
        found = server.run(train_as_in_the_table, math.prod(mesh), (mesh,), backend=None).values
        assert [losses for losses, _ in found] == [expected] * math.prod(mesh), name
        expect_equal_replicas([bits for _, bits in found], mesh)


def expect_equal_replicas(bits, mesh):
    """Ranks with one tp coordinate have equal bits of each parameter that both have; all tp ranks do if it is full."""
    for name in set().union(*bits):
        is_full = name.startswith(("embedding", "scale"))
        for tp in range(mesh[2]):
            ranks = [rank for rank in range(len(bits)) if name in bits[rank] and (is_full or rank % mesh[2] == tp)]
            assert len({bits[rank][name] for rank in ranks}) == 1, (mesh, name)


@pytest.mark.parametrize("options", [{"mesh__pp": 2, "mesh__tp": 2}, {"mesh__tp": 2, "zero__stage": 1}], ids=str)
def test_other_right_answers_train_the_model(ranks, tmp_path, options):
    """Specs of groups in another order, and of tensors found in another way, give the losses of one process."""
    text = write_text(tmp_path)
    common = {"train__steps": 2, "model__num_layers": 2, "optim__clip_norm": 0.5}
    ranks(train_small, 1, small_config(tmp_path / "alone", text, **common))
    config = small_config(tmp_path / "learner", text, engine="simple", **common, **options)
    answers = {"process_groups": "right_table", "tensor_specs": "right_all_ranks_tell_their_boxes"}
    pieces = [
        LearnerPiece(name, EXERCISES[name].pieces, "mine.py", stubs.generate_answer(EXERCISES[name], answer))
        for name, answer in answers.items()
    ]
    ranks(train.train_with_pieces, 4, config, pieces, [*answers])
    one, mine = (
        [
            row["loss"]
            for row in map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
            if "loss" in row
        ]
        for run in ("alone", "learner")
    )
    assert len(one) == 2 and mine == pytest.approx(one, rel=1e-5)  # float32 sums in another order
