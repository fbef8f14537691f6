"""Training with the learner's code: the simple trainer with the learner's passed functions in place of the package's.

All of them are installed, in every run. Which are called depends on the layout: layouts.toml says which layout calls
which, as counted. Without options that set a layout, the run takes the layout that calls most of them. At the end every
rank reports its calls, and a small model shows that the layout, with the learner's code, equals one process.
"""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exercises.catalogue import NONE, Catalogue, Exercise
from exercises.layouts import (
    ENGINE,
    MIN_RANKS,
    best_layout,
    layout_options,
    layouts_that_call,
    option_names,
    read_layouts,
    read_resumed,
)
from exercises.learner_pieces import LearnerPiece, install_pieces, read_piece
from exercises.work import Work
from minidist.errors import RunError, UserError

if TYPE_CHECKING:
    from minidist.comm import Group, Meter, World
    from minidist.config import Config
    from minidist.train.observer import Observer

_RESUMED = "--checkpoint.resume auto, in a --folder with a checkpoint"


def train(catalogue: Catalogue, work: Work, only: Sequence[str], argv: list[str]) -> None:
    """Train with the passed pieces (those named in `only`, if any are) and the options of `minidist train` in `argv`.

    The run does not end if its output cannot be written. Raises UserError if it can use no passed piece, RunError if it
    fails, calls none of them, or differs from one process.
    """
    from exercises.parity import prove_layout
    from minidist.tools.cli import parse_train_options
    from minidist.tools.launch.start import choose_default_ranks, start
    from minidist.tools.launch.torchrun import is_first_rank, is_under_torchrun, read_world_size
    from minidist.tools.standard_streams import drop_failed_writes

    passed = passed_pieces(catalogue, work, only)
    left_out = {each.name: reason for each in passed if (reason := reason_to_leave_out(each, work))}
    used = [each for each in passed if each.name not in left_out]
    if not used:
        raise UserError("a run can use none of your passed pieces:\n" + "\n".join(_format_choices([], left_out)))
    config, ranks = parse_train_options(argv, default_options=ENGINE)
    if config.engine != "simple":
        raise UserError(f"--engine {config.engine}: your code is part of the simple trainer: leave --engine out.")
    size = read_world_size() if is_under_torchrun() else ranks or choose_default_ranks(config)
    layouts = {name: names for name, names in read_layouts(catalogue.root).items() if size >= MIN_RANKS.get(name, 1)}
    layout = None if config.given & option_names() else best_layout([each.name for each in used], layouts)
    if layout is not None:
        config, _ = parse_train_options(argv, default_options=[*ENGINE, *layout_options(layout, size)])
    pieces = [read_piece(each, work) for each in used]
    expected = layouts[layout] if layout is not None else ()
    with drop_failed_writes("stdout", "stderr"):
        if is_first_rank():
            how = "that of your options" if layout is None else f"{layout}, {shlex.join(layout_options(layout, size))}"
            print("\n".join([f"layout: {how}", *_format_choices(used, left_out)]), flush=True)
        start(config, ranks, train_with_pieces, (pieces, expected))
        if not is_under_torchrun():
            print(prove_layout(config, size, pieces), flush=True)


def reason_to_leave_out(exercise: Exercise, work: Work) -> str:
    """Return why no run can use a passed piece; "" if it can be used."""
    if exercise.route.startswith(NONE):
        return exercise.route.removeprefix(NONE)
    if not work.is_unchanged_since_pass(exercise):
        return f"changed since it passed: python -m exercises check {exercise.name}"
    return ""


def passed_pieces(catalogue: Catalogue, work: Work, only: Sequence[str]) -> list[Exercise]:
    """Return the passed pieces, those named in `only` if any are. Raises UserError if there is none."""
    for name in only:
        if catalogue[name].kind != "piece":
            raise UserError(f"{name} is an exercise of kind {catalogue[name].kind}, not a piece of the trainer")
        if not work.entry(catalogue[name]).get("passed"):
            raise UserError(f"you have not passed {name} yet: python -m exercises check {name}")
    passed = [
        exercise
        for exercise in catalogue.values()
        if exercise.kind == "piece"
        and exercise.name in (only or [exercise.name])
        and work.entry(exercise).get("passed")
    ]
    if not passed:
        raise UserError("you have passed no piece yet, so there is nothing to run; python -m exercises list shows all")
    return passed


def train_with_pieces(
    world: "World", config: "Config", pieces: Sequence[LearnerPiece], expected: Sequence[str] = ()
) -> None:
    """Install the pieces, train, and print how often each was called; every rank calls it.

    expected: the names of the pieces that some rank must call. Raises RunError on all ranks if one of them, or any
    piece at all, was not called.
    """
    from minidist import comm

    control = bind_control_group(world)
    calls_by_rank, _ = train_and_count(world, control, config, pieces)
    if world.rank == 0:
        for line in format_calls(pieces, calls_by_rank):
            print(line, flush=True)
    comm.barrier(control)
    called = set().union(*calls_by_rank)
    if unused := [piece.name for piece in pieces if piece.name in expected and piece.name not in called]:
        raise RunError(f"no rank called {', '.join(unused)}, although this layout calls it")
    if not called:
        raise RunError("no rank called any of your pieces; leave the options of the layout out, and one is chosen")


def bind_control_group(world: "World") -> "Group":
    """Collective: return a process group of all ranks, for what they exchange about a run."""
    from minidist import comm
    from minidist.mesh import Mesh

    return comm.bind(world, Mesh(dp=world.size), [])["control"]


def train_and_count(
    world: "World",
    control: "Group",
    config: "Config",
    pieces: Sequence[LearnerPiece],
    observers: "Sequence[Observer]" = (),
    meter: "Meter | None" = None,
) -> tuple[list[dict[str, int]], dict[str, Any]]:
    """Collective: install the pieces and train; return the calls of each piece by rank, and the summary of the run.

    control: of all ranks. observers, meter: as for `train_and_report`.
    """
    from minidist import comm
    from minidist.tools.launch.run import train_and_report

    calls = install_pieces(pieces)
    summary = train_and_report(world, config, observers, meter)
    return comm.all_gather_object(dict(calls), control), summary


def format_calls(pieces: Sequence[LearnerPiece], calls_by_rank: Sequence[dict[str, int]]) -> list[str]:
    """Format the number of calls of every piece on every rank, as lines; pieces without calls come last."""
    counts = {piece.name: [calls.get(piece.name, 0) for calls in calls_by_rank] for piece in pieces}
    lines = ["your code trained this model; calls on each rank:"]
    lines += [f"  {name:<26}" + " ".join(f"{n:>8,}" for n in row) for name, row in counts.items() if any(row)]
    layouts, resumed = read_layouts(), read_resumed()
    elsewhere: dict[str, list[str]] = {}
    for name, row in counts.items():
        if not any(row):
            where = _RESUMED if name in resumed else _layout_that_calls(name, layouts, len(calls_by_rank))
            elsewhere.setdefault(where, []).append(name)
    if elsewhere:
        lines.append("not called here, but with these options:")
    return lines + [f"  {where}: {', '.join(names)}" for where, names in elsewhere.items()]


def _layout_that_calls(exercise: str, layouts: dict[str, tuple[str, ...]], num_ranks: int) -> str:
    """Return the options of the first layout that calls an exercise's function."""
    name = next(iter(layouts_that_call(exercise, layouts)), None)
    if name is None:
        return "none"
    ranks = max(num_ranks, MIN_RANKS.get(name, 1))
    return f"--ranks {ranks} {shlex.join(layout_options(name, ranks))}"


def _format_choices(used: Sequence[Exercise], left_out: dict[str, str]) -> list[str]:
    """Return a line for each installed piece and each one that is left out, with the reason."""
    lines = [f"{'yours':<9}{each.name}" for each in used]
    return lines + [f"{'left out':<9}{name:<26}{reason}" for name, reason in left_out.items()]
