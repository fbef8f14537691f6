"""`%train NAMES` in a notebook: the simple trainer with the learner's passed functions, beside the package's own.

Each run takes seconds: a small model on generated text. The layouts are chosen so that every function is called.
"""

import contextlib
import io
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exercises.catalogue import Catalogue, Exercise
from exercises.layouts import ENGINE, MIN_RANKS, best_layout, layout_options, read_layouts, read_resumed
from exercises.learner_pieces import LearnerPiece, install_pieces, read_piece
from exercises.train import reason_to_leave_out
from exercises.work import Work
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from minidist.comm import World
    from minidist.config import Config
    from minidist.tools.launch import RankServer

STEPS = 60
_RANKS = 2
_ROWS = 6  # of the table of losses
_DEADLINE_S = 300.0
_MODEL = (
    *("--model.num-layers", "2", "--model.hidden-size", "64", "--model.intermediate-size", "128"),
    *("--model.num-heads", "2", "--model.num-kv-heads", "2", "--data.source", "synthetic", "--data.seq-len", "32"),
    *("--train.global-batch", "16", "--train.log-every", "1", "--train.eval-every", "0", "--train.eval-samples", "4"),
    *("--train.sample-tokens", "0", "--optim.warmup-steps", "5", "--device", "cpu"),
)


class Comparison(NamedTuple):
    """Two runs of one layout. yours, ours: the loss of each step. calls: of the learner's pieces, summed over ranks."""

    layout: str
    options: str
    yours: dict[int, float]
    ours: dict[int, float]
    calls: dict[str, int]

    def __str__(self) -> str:
        steps = sorted(self.yours)
        shown = sorted({steps[row * (len(steps) - 1) // (_ROWS - 1)] for row in range(_ROWS)})
        called = ", ".join(f"{name} ({count:,} calls)" for name, count in self.calls.items())
        difference = max(abs(self.yours[step] - self.ours[step]) for step in steps)
        return "\n".join(
            [
                f"{self.layout} ({self.options}), with your {called}:",
                "    step  your code    ours",
                *(f"  {step:>6}   {self.yours[step]:>8.4f}  {self.ours[step]:>6.4f}" for step in shown),
                f"  largest difference between the two losses: {difference:.1e}",
            ]
        )


def choose_passed(exercises: Sequence[Exercise], work: Work | None) -> tuple[list[Exercise], dict[str, str]]:
    """Return the exercises whose passed functions a run can use, and why each of the others is not used, by name."""
    left_out = {}
    for each in exercises:
        if each.kind != "piece":
            raise UserError(f"{each.name} is an exercise of kind {each.kind}, not a piece of the trainer")
        if work is None or not work.entry(each).get("passed"):
            left_out[each.name] = "not passed yet"
        elif reason := reason_to_leave_out(each, work):
            left_out[each.name] = reason
    return [each for each in exercises if each.name not in left_out], left_out


def choose_layouts(names: Sequence[str], layouts: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names of few layouts that together call all of these exercises that any layout calls."""
    left, chosen = set(names), []
    layouts = dict(reversed(layouts.items()))  # of several that call equally many, the first and simplest
    while layout := best_layout(sorted(left), layouts):
        chosen.append(layout)
        left -= set(layouts[layout])
    return chosen


def compare_with_package(
    catalogue: Catalogue, pieces: Sequence[LearnerPiece], layout: str, server: "RankServer"
) -> Comparison:
    """Train in a layout with the learner's pieces and with the package's own code; return the Comparison.

    If the pieces include one that only a resumed run calls, both runs stop halfway and resume from a checkpoint. Raises
    RunError if a run fails, or if no rank calls a piece that the layout calls.
    """
    from minidist.tools.cli import parse_train_options

    resumed = set(read_resumed(catalogue.root)) & {piece.name for piece in pieces}
    expected = [*read_layouts(catalogue.root)[layout], *resumed]
    ranks = max(_RANKS, MIN_RANKS.get(layout, 1))
    options, losses, calls = layout_options(layout, ranks), [], {}
    with tempfile.TemporaryDirectory(prefix="minidist-train-") as folder:
        for name, used in (("yours", pieces), ("ours", ())):
            words = [*ENGINE, *_MODEL, *options, "--folder", f"{folder}/{name}", "--checkpoint.every", str(STEPS // 2)]
            parts = (STEPS // 2, STEPS) if resumed else (STEPS,)
            configs = [
                parse_train_options([*words, "--train.steps", str(steps), "--checkpoint.resume", "auto"])[0]
                for steps in parts
            ]
            found = server.run(_train, ranks, (configs, used), threads=1, deadline_s=_DEADLINE_S).values
            if name == "yours":
                calls = {piece.name: sum(each.get(piece.name, 0) for each in found) for piece in pieces}
            rows = map(json.loads, Path(folder, name, "metrics.jsonl").read_text().splitlines())
            losses.append({row["step"]: row["loss"] for row in rows if "loss" in row})
    if unused := [name for name, count in calls.items() if name in expected and not count]:
        raise RunError(f"no rank called {', '.join(unused)}, although this layout calls it")
    called = {name: count for name, count in calls.items() if count}
    return Comparison(layout, f"{shlex.join(options)} on {ranks} ranks", *losses, called)


def _train(world: "World", configs: Sequence["Config"], pieces: Sequence[LearnerPiece]) -> dict[str, int]:
    """Install the pieces and train, one run after the other; return this rank's calls of each piece."""
    from minidist.tools.launch.run import train_and_report

    calls = install_pieces(pieces)
    with contextlib.redirect_stdout(io.StringIO()):
        for config in configs:
            train_and_report(world, config)
    return dict(calls)


def train_in_notebook(catalogue: Catalogue, work: Work | None, names: Sequence[str], server: "RankServer") -> None:
    """Train with the passed ones of these exercises beside the package's own code, and print the losses of both.

    Without a passed one nothing is trained, and one line says so. Raises UserError for a name that is not a piece, and
    RunError if the learner's code fails.
    """
    exercises = [catalogue[name] for name in names]
    used, left_out = choose_passed(exercises, work)
    for name, reason in left_out.items():
        if reason != "not passed yet":
            print(f"the package's {name} is used, not yours: {reason}")
    if missing := [name for name, reason in left_out.items() if reason == "not passed yet"]:
        others = "the package's own is used" if used else "pass one, and this cell trains the model with it"
        print(f"not passed yet: {', '.join(missing)}; {others}")
    if not used:
        return
    pieces, layouts = [read_piece(each, work) for each in used], read_layouts(catalogue.root)
    # Resumption needs any layout: that of the other pieces, or the simplest.
    for layout in choose_layouts([each.name for each in used], layouts) or [next(iter(layouts))]:
        print(compare_with_package(catalogue, pieces, layout, server), flush=True)
