"""The solutions of chapter 05 shard the model of a real run; the messages about usual wrong answers."""

import ast
import json

import pytest

from exercises import report, stubs, train
from exercises.catalogue import Catalogue
from exercises.check import check
from exercises.train import LearnerPiece
from minidist.errors import RunError
from tests.helpers.small_run import small_config, train_small, write_text

EXERCISES = Catalogue()
TOGETHER = {
    1: ["flat_partition", "stage_one_step"],
    2: ["flat_partition", "stage_one_step", "shard_gradients"],
    3: ["flat_partition", "stage_one_step", "shard_gradients", "gather_and_free"],
}


def losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(name: str) -> LearnerPiece:
    exercise = EXERCISES[name]
    return LearnerPiece(name, exercise.pieces, "mine.py", exercise.solution.read_text())


@pytest.mark.parametrize("stage", TOGETHER)
def test_the_learners_zero_pieces_train_the_model(ranks, tmp_path, stage):
    text = write_text(tmp_path)

    def config(name, **change):
        return small_config(tmp_path / name, text, train__steps=2, model__num_layers=2, **change)

    ranks(train_small, 1, config("alone"))
    ranks(train.train_with_pieces, 3, config("learner", zero__stage=stage), [piece(name) for name in TOGETHER[stage]])
    one, mine = losses(tmp_path / "alone"), losses(tmp_path / "learner")
    assert len(one) == 2 and mine == pytest.approx(one, rel=1e-5)  # float32 sums in another order


def test_a_piece_of_a_later_stage_is_missed(ranks, tmp_path):
    with pytest.raises(RunError, match="some rank never called gather_and_free"):
        config = small_config(tmp_path / "run", write_text(tmp_path), train__steps=1, zero__stage=1)
        ranks(train.train_with_pieces, 2, config, [piece("flat_partition"), piece("gather_and_free")])


@pytest.mark.parametrize("name", ["gather_and_free"])
def test_a_piece_of_two_modules_imports_nothing_that_it_defines(name):
    exercise = EXERCISES[name]
    assert len(exercise.modules) == len(exercise.sources) == 2
    for file in (exercise.stub, exercise.solution):
        nodes = ast.parse(file.read_text()).body
        imported = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        defined = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        assert defined == set(exercise.symbols) and not defined & set(imported)
        assert len(imported) == len(set(imported))


def test_neither_module_of_a_piece_may_be_read(check_answer):
    exercise = EXERCISES["gather_and_free"]
    text = exercise.solution.read_text()
    for source in exercise.sources:
        tries = f"        open({str(source)!r}).read()\n        super().__init__(*arguments, **options)\n"
        reads = text.replace("        super().__init__(*arguments, **options)\n", tries)
        assert reads != text
        finding = check_answer(exercise, reads, only=["gather_and_release_one"]).results[0].finding
        assert finding.kind == "forbidden" and f"reads {source.name}" in finding.what


# Exercise and wrong answer; the test that sees it, and what it says.
MESSAGES = {
    ("flat_partition", "wrong_rest_cut_off"): (
        "padding_is_minimal",
        [
            "elements of a shard",
            "  for       lay_out_flat({'a': 5, 'b': 4, 'c': 1}, 3)",
            "  expected  4",
            "  got       3",
        ],
    ),
    ("stage_one_step", "wrong_all_reduced"): (
        "two_messages_per_flat_param",
        [
            "what is sent: (operation, elements)",
            "  for       1 micro-batch",
            "  rank      0 of 2",
            "  expected  [['reduce_scatter', 10], ['reduce_scatter', 22], ['all_gather', 10], ['all_gather', 22]]",
            "  got       [['all_reduce', 10], ['all_reduce', 22], ['all_gather', 10], ['all_gather', 22]]",
        ],
    ),
    ("shard_gradients", "wrong_given_back_late"): (
        "flat_gradient_is_freed",
        [
            "KiB of gradients after wait()",
            "  for       four rows of 256 KiB, shards of 128; micro-batch 1, row 1",
            "  rank      0 of 2",
            "  expected  128",
            "  got       384",
        ],
    ),
    ("shard_gradients", "wrong_waits_at_once"): (
        "reduction_overlaps_with_backward",
        [
            "when reduction 1 of 3 is waited for",
            "  for       3 micro-batches",
            "  rank      0 of 2",
            "  expected  after launch() has returned",
            "  got       inside launch()",
        ],
    ),
    ("gather_and_free", "wrong_gone_in_backward"): (
        "equals_one_process",
        ["the backward of block 1 begins, and its row has no memory", "  for       stage 3"],
    ),
    ("gather_and_free", "wrong_prefetch_never"): (
        "prefetch_overlaps_with_compute",
        [
            "the gather of block 0 is launched",
            "  for       prefetch=True",
            "  rank      0 of 2",
            "  expected  before the embedding computes",
            "  got       after the embedding computes",
        ],
    ),
    ("sharded_nothing", "wrong_gradients_gathered_too"): (
        "no_more_bytes_than_an_all_reduce",
        [
            "bytes that all ranks send in a step",
            "  for       main(...)",
            "  rank      0 of 2",
            "  expected  3856 to 3872: (ranks - 1) rows for a reduce-scatter, as many for an all-gather",
            "  got       5808",
        ],
    ),
}


@pytest.mark.parametrize("exercise, answer", MESSAGES)
def test_messages_about_wrong_answers(server, tmp_path, exercise, answer):
    test, told = MESSAGES[exercise, answer]
    file = stubs.write_answer(EXERCISES[exercise], answer, tmp_path)
    [result] = check(EXERCISES[exercise], file, server, only=[test]).results
    assert report.format_finding(result.finding) == told


@pytest.mark.parametrize("answer", ["wrong_named_only", "wrong_cheat"])
def test_unsharded_states_are_reported_in_bytes(server, tmp_path, answer):
    exercise = EXERCISES["sharded_nothing"]
    file = stubs.write_answer(exercise, answer, tmp_path)
    [first, *_] = check(exercise, file, server, only=["states_are_sharded"]).results
    what, case, _, expected, got = report.format_finding(first.finding)
    assert what == "KiB that a rank keeps between two steps" and case.endswith("parameters of 1875 KiB, 2 ranks")
    assert "at most 7500" in expected and int(got.split()[-1]) > 8400
