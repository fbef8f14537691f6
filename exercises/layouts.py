"""The layouts in which `exercises train` runs the simple trainer, and the exercises whose functions each of them calls.

`layouts.toml` has what was counted: `python -m exercises layouts` runs the simple trainer in every layout, with the
solutions of all exercises in it, and writes which of them were called. A test counts again.
"""

import contextlib
import io
import shlex
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exercises.catalogue import ROOT, Catalogue
from exercises.learner_pieces import LearnerPiece, install_pieces

if TYPE_CHECKING:
    from minidist.comm import World
    from minidist.config import Config
    from minidist.tools.launch import RankServer

ENGINE = ("--engine", "simple")
# Options by the layout's name. {ranks}: the number of ranks. {shares}: one number for each rank, all different.
LAYOUTS = {
    "naive": "--comm.gradients naive",
    "tree": "--comm.gradients naive --comm.algorithm tree",
    "ring": "--comm.gradients naive --comm.algorithm ring",
    "doubling": "--comm.gradients naive --comm.algorithm doubling",
    "bucketed": "--comm.gradients bucketed",
    "shares": "--data.shares {shares}",
    "tensor": "--mesh.tp {ranks}",
    "sequence": "--mesh.tp {ranks} --parallel.sequence",
    "gpipe": "--mesh.pp {ranks} --parallel.schedule gpipe --train.micro-batches 4",
    "1f1b": "--mesh.pp {ranks} --parallel.schedule 1f1b --train.micro-batches 4",
    "split backward": "--mesh.pp {ranks} --parallel.schedule zb-h1 --train.micro-batches 4",
    "ring attention": "--mesh.cp {ranks} --parallel.context ring",
    "ulysses": "--mesh.cp {ranks} --parallel.context ulysses",
    "local": "--consistency.mode local --consistency.h 2",
    "diloco": "--consistency.mode diloco --consistency.h 2",
    "zero 1": "--zero.stage 1",
    "zero 2": "--zero.stage 2",
    "zero 3": "--zero.stage 3",
    "bf16": "--precision.policy bf16",
    "fp16": "--precision.policy fp16",
    "recompute": "--recompute block",
    "repair": "--fault.digest-every 1 --fault.repair --fault.inject 'flip rank 1 at step 1 in gather'",
}
RESUMED = "resumed"  # not a layout: what only a run that resumes from a checkpoint calls
MIN_RANKS = {"repair": 3}  # a majority of equal replicas; all others run on two ranks
LAYOUT_PRELOAD = ("minidist.tools.launch.run",)  # modules for the ranks that count calls
_FILE = ROOT / "exercises" / "layouts.toml"
_RANKS = 2  # that count, or more
SMALL_MODEL = (
    *("--model.num-layers", "2", "--model.hidden-size", "16", "--model.intermediate-size", "16"),
    *("--model.num-heads", "2", "--model.num-kv-heads", "2", "--model.vocab-size", "256"),
    *("--data.source", "synthetic", "--data.seq-len", "16", "--train.global-batch", "8", "--train.eval-samples", "4"),
    *("--train.sample-tokens", "0", "--checkpoint.every", "2", "--device", "cpu"),
)
_STEPS, _RESUMED_STEPS = 2, 4


def layout_options(name: str, ranks: int) -> list[str]:
    """Return the options of a layout on `ranks` ranks, as words of a command line."""
    shares = " ".join(str(ranks - rank) for rank in range(ranks))
    return shlex.split(LAYOUTS[name].replace("{shares}", shares).replace("{ranks}", str(ranks)))


def option_names() -> set[str]:
    """Return the names of all options that set a layout, such as "mesh.tp"."""
    words = (word for options in LAYOUTS.values() for word in options.split())
    return {word[2:] for word in words if word.startswith("--") and not word.startswith("--train.")}


def read_layouts(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """Return the names of the exercises that each layout calls, by the layout's name."""
    table = tomllib.loads((root / "exercises" / _FILE.name).read_text())
    return {name: tuple(table.get(name, ())) for name in LAYOUTS}


def read_resumed(root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of the exercises that only a run that resumes from a checkpoint calls, in any layout."""
    return tuple(tomllib.loads((root / "exercises" / _FILE.name).read_text()).get(RESUMED, ()))


def layouts_that_call(exercise: str, layouts: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the layouts that call an exercise's function, in their order."""
    return [name for name, called in layouts.items() if exercise in called]


def best_layout(exercises: Sequence[str], layouts: dict[str, tuple[str, ...]]) -> str | None:
    """Return the layout that calls most of these exercises, the latest of several; None if none calls any."""
    counts = {name: len(set(exercises) & set(called)) for name, called in layouts.items()}
    most = max(counts.values())
    return [name for name, count in counts.items() if count == most][-1] if most else None


def count_calls(
    catalogue: Catalogue, server: "RankServer", names: Sequence[str] = tuple(LAYOUTS)
) -> dict[str, list[str]]:
    """Run layouts with all solutions in the simple trainer; return the exercises that each calls, in their order.

    Every run saves a checkpoint, and a second one resumes from it: RESUMED has what only the second runs call.
    """
    from minidist.tools.cli import parse_train_options

    pieces = [
        LearnerPiece(each.name, each.pieces, str(each.solution), each.solution.read_text())
        for each in catalogue.values()
        if each.kind == "piece"
    ]
    found, in_second_runs = {}, set()
    with tempfile.TemporaryDirectory(prefix="minidist-layouts-") as folder:
        for name in names:
            ranks = max(_RANKS, MIN_RANKS.get(name, 1))
            options = [*ENGINE, *SMALL_MODEL, *layout_options(name, ranks), "--folder", f"{folder}/{name}"]
            steps = [["--train.steps", str(number)] for number in (_STEPS, _RESUMED_STEPS)]
            configs = [parse_train_options([*options, *words, "--checkpoint.resume", "auto"])[0] for words in steps]
            by_rank = server.run(_train_and_count, ranks, (configs, pieces), threads=1).values
            called, called_later = (set().union(*of_run) for of_run in zip(*by_rank, strict=True))
            found[name] = [each for each in catalogue if each in called]
            in_second_runs |= called_later - called
    return {**found, RESUMED: [each for each in catalogue if each in in_second_runs]}


def _train_and_count(world: "World", configs: Sequence["Config"], pieces: Sequence[LearnerPiece]) -> list[set[str]]:
    """Train with these pieces, one run after the other; return the names of those that this rank called in each."""
    return [set(calls) for calls, _ in train_each(world, configs, pieces)]


def train_each(
    world: "World", configs: Sequence["Config"], pieces: Sequence[LearnerPiece]
) -> list[tuple[dict[str, int], str]]:
    """Train with these pieces, one run after the other; return this rank's calls of each and its output, by run."""
    from minidist.tools.launch.run import train_and_report

    counted, found = install_pieces(pieces), []
    for config in configs:
        counted.clear()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            train_and_report(world, config)
        found.append((dict(counted), output.getvalue()))
    return found


def write_layouts(found: dict[str, list[str]], root: Path = ROOT) -> Path:
    """Write what `count_calls` has returned to `layouts.toml`; return the file."""
    lines = ["# The exercises that each layout of `exercises train` calls: counted by `python -m exercises layouts`."]
    for name, exercises in found.items():
        lines += [f'"{name}" = [', *(f'    "{each}",' for each in exercises), "]"]
    file = root / "exercises" / _FILE.name
    file.write_text("\n".join(lines) + "\n")
    return file
