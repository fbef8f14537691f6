"""`python -m exercises train`: the learner's passed pieces, and no others, train the model; their calls are counted."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from exercises import train
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.train import LearnerPiece, choose_pieces, format_calls, route_options
from exercises.work import Work
from minidist.errors import RunError, UserError
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


def losses(ranks, folder: Path, pieces: list[LearnerPiece], **changes) -> list[float]:
    """Of a small run on two ranks, in process groups of the warm server. changes: of its configuration."""
    run = folder / "-".join(["run", *changes])
    ranks(train.train_with_pieces, 2, small_config(run, write_text(folder), train__steps=2, **changes), pieces)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def piece(name: str, change=lambda text: text, file: str = "mine.py") -> LearnerPiece:
    """The solution of an exercise with some text replaced."""
    exercise = CATALOGUE[name]
    symbols = tuple(f"{exercise.module}:{symbol}" for symbol in exercise.symbols)
    return LearnerPiece(name, symbols, file, change(exercise.solution.read_text()))


def test_the_learners_pieces_train_the_model_and_are_counted(work):
    folder = work("block_partition", "weighted_partition", "strided_partition", "gradient_sum")
    ran = command(folder, "--ranks", "2")
    assert ran.returncode == 0, ran.stderr
    head, _, counts = ran.stdout.partition("your code trained this model; calls on each rank:\n")
    assert "yours    weighted_partition    --data.shares 2 1\n" in head
    assert "left out strided_partition     the loader cuts consecutive blocks" in head
    calls = {name: list(map(int, numbers)) for name, *numbers in map(str.split, counts.splitlines())}
    assert calls["weighted_partition"] == [3, 3]  # once in each step
    assert set(calls) == {"block_partition", "weighted_partition", "gradient_sum"} and min(map(min, calls.values())) > 0


def test_an_edit_of_the_learner_changes_the_training(ranks, tmp_path):
    def half(text):
        return text.replace("/ count.value", "/ count.value / 2")

    found = []
    for number, pieces in enumerate([[], [piece("block_partition")], [piece("weighted_loss", half)]]):
        (folder := tmp_path / str(number)).mkdir()
        found.append(losses(ranks, folder, pieces))
    assert found[0] == found[1] and found[0][0] != found[2][0]


@pytest.mark.exhaustive
def test_it_runs_under_torchrun(work):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = command(work("gradient_sum"), launcher=launcher)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("your code trained this model") == 1 and "gradient_sum" in ran.stdout.splitlines()[-1]


def test_an_error_in_the_learners_code_names_its_line(ranks, tmp_path):
    broken = piece(
        "block_partition", lambda text: text.replace("    _check(", "    1 / 0\n    _check("), "of/learner.py"
    )
    line = 1 + broken.source.splitlines().index("    1 / 0")
    with pytest.raises(RunError, match=rf"raised ZeroDivisionError(.|\n)*of/learner.py:{line} in block_partition"):
        losses(ranks, tmp_path, [broken])


def test_a_piece_that_no_rank_calls_is_an_error(ranks, tmp_path):
    with pytest.raises(RunError, match="some rank never called strided_partition"):
        losses(ranks, tmp_path, [piece("block_partition"), piece("strided_partition")])


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


@pytest.mark.parametrize("word", ["None", "1 1"])
def test_options_of_another_kind_leave_the_piece_out(work, capsys, word):
    assert main(["--work", str(work("weighted_partition")), "train", "--data.shares", *word.split()]) == 2
    assert "your options conflict with --data.shares 2 1" in capsys.readouterr().err


def test_options_that_lead_elsewhere_leave_the_piece_out(work, capsys):
    assert main(["--work", str(work("gradient_sum")), "train", "--comm.gradients", "bucketed"]) == 2
    assert "left out gradient_sum" in (error := capsys.readouterr().err)
    assert "your options conflict with --comm.gradients naive" in error


def test_of_two_pieces_on_different_ways_the_later_one_is_used():
    chosen = choose_pieces(
        [CATALOGUE["block_partition"], CATALOGUE["gradient_sum"], CATALOGUE["overlapped_reducer"]], 3
    )
    assert [bool(choice.left_out) for choice in chosen] == [False, True, False]
    assert "--only gradient_sum" in chosen[1].left_out
    assert chosen[2].options[:4] == ("--engine", "mixed", "--comm.gradients", "bucketed")


def test_a_piece_that_several_values_lead_to_takes_that_of_the_others():
    names = ["overlapped_reducer", "flat_shards", "zero_stage_one", "zero_stage_two", "zero_stage_three"]
    stages = {}
    for count in range(2, len(names) + 1):
        chosen = choose_pieces([CATALOGUE[name] for name in names[:count]], 2)
        assert [bool(choice.left_out) for choice in chosen] == [True] + [False] * (count - 1)
        stages[names[count - 1]] = {choice.options for choice in chosen if not choice.left_out}
    assert stages["zero_stage_one"] == {("--engine", "mixed", "--zero.stage", "1")}
    assert stages["zero_stage_two"] == {("--engine", "mixed", "--zero.stage", "2")}
    assert stages["zero_stage_three"] == {("--engine", "mixed", "--zero.stage", "3")}


def test_either_of_several_values_may_be_asked_for():
    from minidist.tools.cli import parse_train_options

    for stage, lost in (("1", "--zero.stage 2 or 3"), ("2", ""), ("3", "")):
        config, _ = parse_train_options(["--engine", "mixed", "--zero.stage", stage])
        assert train.conflicting_option(train.PieceChoice(CATALOGUE["zero_stage_two"]), config, 2) == lost


def test_the_staleness_bound_is_that_of_the_trainers_server(ranks, tmp_path):
    """The server is on rank 0, which alone calls the piece; a run in another mode calls it nowhere."""
    mine = train.LearnerPiece(**vars(piece("staleness_bound")) | {"one_rank": CATALOGUE["staleness_bound"].one_rank})
    losses(ranks, tmp_path, [mine], consistency__mode="stale")
    with pytest.raises(RunError, match="some rank never called staleness_bound"):
        losses(ranks, tmp_path, [mine])
    [choice] = choose_pieces([CATALOGUE["staleness_bound"]], 3)
    assert not choice.left_out and choice.options[:2] == ("--consistency.mode", "stale")


@pytest.mark.parametrize("name", [name for name in CATALOGUE if CATALOGUE[name].route])
def test_every_route_can_be_read_and_is_an_option_of_the_trainer(name):
    from minidist.tools.cli import parse_train_options

    route = CATALOGUE[name].route
    if route.startswith("none: "):
        assert len(route) > len("none: ") + 10
        return
    words = [word for option, values in route_options(CATALOGUE[name], 3).items() for word in (option, *values)]
    config, _ = parse_train_options([], default_options=words)
    assert not train.conflicting_option(train.PieceChoice(CATALOGUE[name]), config, 3) and (route == "always") == (
        not words
    )


def test_a_class_counts_its_methods_and_a_function_itself(ranks):
    assert ranks(counted, 1) == [{"sizes": 2, "bucket": 1}]


def counted(world):
    source = "def permutation(n, seed, epoch=0):\n    'Doc.'\n    return n\n"
    bucket = "class Bucket:\n    def launch(self, filled):\n        return filled\n"
    calls = train.install_pieces(
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
            train.install_pieces(
                [LearnerPiece("mine", ("minidist.data.partition:block_partition",), "mine.py", source)]
            )


def test_calls_are_reported_by_rank():
    lines = format_calls(
        [LearnerPiece("one", (), "", ""), LearnerPiece("two", (), "", "")], [Counter(one=2), {"one": 3, "two": 1200}]
    )
    assert [line.split() for line in lines[1:]] == [["one", "2", "3"], ["two", "0", "1,200"]]
