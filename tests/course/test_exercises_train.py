"""`python -m exercises train`: the simple trainer with the learner's passed pieces; their calls are counted."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from exercises import layouts, train
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.check import PRELOAD
from exercises.layouts import LAYOUT_PRELOAD, LAYOUTS, best_layout, count_calls, layout_options, read_layouts
from exercises.learner_pieces import LearnerPiece, install_pieces
from exercises.work import Work
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer
from minidist.tools.pieces import read_symbol_source
from tests.helpers.small_run import small_config, write_text
from tests.helpers.warm_python import warm_python

CATALOGUE = Catalogue()
DEADLINE_S = 240.0
TINY = shlex.split(
    "--data.source synthetic --data.seq-len 16 --train.steps 3 --train.global-batch 5 --train.sample-tokens 0 "
    "--train.eval-samples 4 --model.hidden-size 16 --model.intermediate-size 16 --model.num-layers 1 "
    "--model.num-heads 1 --model.num-kv-heads 1"
)


@pytest.fixture
def work(tmp_path):
    """A learner's folder; `work(name, ...)` solves these exercises and records that they have passed."""
    work = Work(tmp_path / "work")
    work.update(CATALOGUE)

    def solve(*names: str, change=lambda text: text) -> Path:
        for name in names:
            exercise = CATALOGUE[name]
            work.file(exercise).write_text(change(exercise.solution.read_text()))
            work.record(exercise, True, exercise.points, work.file(exercise).read_bytes())
        return work.folder

    return solve


def command(folder: Path, *words: str, launcher: tuple[str, ...] = ()):
    line = [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), "exercises", "--work", str(folder), "train"]
    line += [*words, *TINY, "--folder", str(folder / "run")]
    return warm_python.run(line, cwd=ROOT, timeout=DEADLINE_S)


def losses(ranks, folder: Path, pieces: list[LearnerPiece], *expected: str, **changes) -> list[float]:
    """Of a small run on two ranks, in process groups of the warm server. changes: of its configuration."""
    run = folder / "-".join(["run", *changes])
    config = small_config(run, write_text(folder), engine="simple", train__steps=2, **changes)
    ranks(train.train_with_pieces, 2, config, pieces, expected)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(symbol: str, old: str = "", new: str = "", file: str = "mine.py") -> LearnerPiece:
    """A function or class of the simple trainer, with some text replaced."""
    source = read_symbol_source(symbol)
    assert old in source
    return LearnerPiece(symbol.partition(":")[2], (symbol,), file, source.replace(old, new) if old else source)


COUNT = "minidist.simple.data_parallel:count_tokens"
ULYSSES = "minidist.simple.context_parallel:ulysses_attention"


def test_the_learners_pieces_train_the_model_and_are_counted(work):
    folder = work("block_partition", "weighted_partition", "strided_partition")
    ran = command(folder, "--ranks", "2")
    assert ran.returncode == 0, ran.stderr
    head, _, rest = ran.stdout.partition("your code trained this model; calls on each rank:\n")
    assert head.startswith("layout: shares, --data.shares 2 1\n") and "yours    weighted_partition\n" in head
    assert "left out strided_partition         the loader cuts consecutive blocks" in head
    *counts, verdict = rest.splitlines()
    calls = {name: list(map(int, numbers)) for name, *numbers in map(str.split, counts)}
    assert calls["weighted_partition"] == [3, 3]  # once in each step
    assert set(calls) == {"block_partition", "weighted_partition"} and min(map(min, calls.values())) > 0
    assert verdict.startswith("equal to one process: dp=2 bucketed") and "uneven-shares" in verdict


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full, which Linux has")
def test_a_run_does_not_end_because_its_output_cannot_be_written(work, monkeypatch):
    ran = []
    monkeypatch.setattr("minidist.tools.launch.start.start", lambda *_: ran.append("training"))
    monkeypatch.setattr("exercises.parity.prove_layout", lambda *_: ran.append("proof") or "equal")
    mine = Work(work("block_partition"))
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        train.train(CATALOGUE, mine, [], ["--ranks", "2"])
    assert ran == ["training", "proof"]


def test_an_edit_of_the_learner_changes_the_training(ranks, tmp_path):
    found = []
    half = piece(COUNT, "return count.item()", "return 2 * count.item()")
    for number, pieces in enumerate([[piece(COUNT)], [half]]):
        (folder := tmp_path / str(number)).mkdir()
        found.append(losses(ranks, folder, pieces, "count_tokens"))
    assert found[0][0] == pytest.approx(2 * found[1][0])


@pytest.mark.exhaustive
def test_it_runs_under_torchrun(work):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = command(work("block_partition"), launcher=launcher)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("your code trained this model") == 1 and "block_partition" in ran.stdout.splitlines()[-1]


def test_an_error_in_the_learners_code_names_its_line(ranks, tmp_path):
    broken = piece(COUNT, "    all_reduce(", "    1 / 0\n    all_reduce(", file="of/learner.py")
    line = 1 + broken.source.splitlines().index("    1 / 0")
    with pytest.raises(RunError, match=rf"raised ZeroDivisionError(.|\n)*of/learner.py:{line} in count_tokens"):
        losses(ranks, tmp_path, [broken])


def test_a_piece_that_no_rank_calls_is_an_error_if_the_layout_calls_it(ranks, tmp_path, capsys):
    pieces = [piece(COUNT), piece(ULYSSES)]
    losses(ranks, tmp_path, pieces, mesh__dp=2)
    with pytest.raises(RunError, match="no rank called ulysses_attention, although this layout calls it"):
        losses(ranks, tmp_path, pieces, "ulysses_attention")
    with pytest.raises(RunError, match="no rank called any of your pieces"):
        losses(ranks, tmp_path, pieces[1:], mesh__pp=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "you have passed no piece yet"),
        (["--only", "block_partition"], "you have not passed block_partition yet"),
        (["--only", "blocks"], "there is no exercise 'blocks'"),
        (["--only", "falling_loss"], "is an exercise of kind debug, not a piece of the trainer"),
    ],
)
def test_what_cannot_train_is_reported(work, capsys, words, message):
    assert main(["--work", str(work()), "train", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_was_changed_since_it_passed_is_left_out(work, capsys):
    folder = work("block_partition")
    with open(folder / "exercises" / "ch01_data_distribution" / "block_partition.py", "a") as file:
        file.write("# better\n")
    assert main(["--work", str(folder), "train"]) == 2
    assert "changed since it passed: python -m exercises check block_partition" in capsys.readouterr().err


def test_the_options_of_the_learner_set_the_layout(work, capsys):
    """Without an option of a layout the best one is taken; with one, none is added."""
    folder = work("weighted_partition")
    ran = command(folder, "--ranks", "2", "--data.shares", "1", "3")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("layout: that of your options\n") and "weighted_partition" in ran.stdout
    assert main(["--work", str(folder), "train", "--engine", "fast"]) == 2
    assert "--engine fast: your code is part of the simple trainer" in capsys.readouterr().err


def test_the_layout_that_calls_most_is_taken_and_of_several_the_latest():
    layouts = {"one": ("a",), "two": ("a", "b"), "three": ("b", "a")}
    assert best_layout(["a", "b", "c"], layouts) == "three" and best_layout(["a"], layouts) == "three"
    assert best_layout(["c"], layouts) is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_of_the_trainer(name):
    from minidist.tools.cli import parse_train_options
    from minidist.validation import validate

    for size in (2, 4):
        config, _ = parse_train_options([*layouts.ENGINE, *layout_options(name, size)])
        validate(config, size)


SAMPLE = ("shares", "sequence", "1f1b", "zero 3", "repair")


@pytest.mark.parametrize(
    "names", [SAMPLE, pytest.param(tuple(LAYOUTS), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_the_layouts_call_what_was_counted(names):
    """Found by running them; `python -m exercises layouts` writes the file anew."""
    with RankServer(preload=(*PRELOAD, *LAYOUT_PRELOAD)) as server:
        found = {name: tuple(called) for name, called in count_calls(CATALOGUE, server, names).items()}
    stored = read_layouts() | {layouts.RESUMED: layouts.read_resumed()}
    assert found == {name: stored[name] for name in found}


def test_every_piece_is_called_by_a_layout_or_says_why_not():
    called = {*layouts.read_resumed()}.union(*read_layouts().values())
    for exercise in CATALOGUE.values():
        if exercise.kind == "piece":
            assert (exercise.name in called) != exercise.route.startswith("none: "), exercise.name


def test_a_class_counts_its_methods_and_a_function_itself(ranks):
    assert ranks(counted, 1) == [{"sizes": 2, "bucket": 1}]


def counted(world):
    source = "def permutation(n, seed, epoch=0):\n    'Doc.'\n    return n\n"
    bucket = "class Bucket:\n    def launch(self, filled):\n        return filled\n"
    calls = install_pieces(
        [
            LearnerPiece("sizes", ("minidist.data.partition:permutation",), "mine.py", source),
            LearnerPiece("bucket", ("minidist.parallel.data.buckets:Bucket",), "mine.py", bucket),
        ]
    )
    from minidist.data.partition import permutation
    from minidist.parallel.data.buckets import Bucket

    assert permutation(3, 0) == permutation(3, 1) == 3 and Bucket().launch("w") == "w"
    return dict(calls)


def test_a_piece_that_does_not_fit_is_reported():
    for source in ("x = 1", "block_partition = lambda n, world_size, rank: 1"):
        with pytest.raises(
            UserError, match="mine cannot replace the package's code: .* must define block_partition with def"
        ):
            install_pieces([LearnerPiece("mine", ("minidist.data.partition:block_partition",), "mine.py", source)])


def test_calls_are_reported_by_rank():
    lines = train.format_calls(
        [LearnerPiece("one", (), "", ""), LearnerPiece("two", (), "", "")], [Counter(one=2), {"one": 3, "two": 1200}]
    )
    assert [line.split() for line in lines[1:]] == [["one", "2", "3"], ["two", "0", "1,200"]]
    pieces = [LearnerPiece(name, (), "", "") for name in ("zero_stage_one", "replica_digest", "flat_parameter")]
    *_, title, zero, repair = train.format_calls(pieces, [{}, {}])
    assert title == "not called here, but with these options:"
    assert zero == "  --ranks 2 --zero.stage 1: zero_stage_one, flat_parameter"
    assert repair.startswith("  --ranks 3 --fault.digest-every 1") and repair.endswith(": replica_digest")
