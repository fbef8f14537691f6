"""`schedule(kind, stages, micro_batches)`: the schedules by name, and what each of them needs."""

import difflib

from minidist.errors import UserError
from minidist.parallel.pipeline import schedule_rules as rules
from minidist.parallel.pipeline.actions import Op, Schedule

KINDS = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward: the memory of `stages` micro-batches at most",
    "interleaved": "1f1b over several chunks of the model a stage: a smaller bubble, more transfers",
    "zb-h1": "1f1b with the backward in two halves: a third of the bubble",
    "zb-h2": "more forwards first: hardly a bubble, twice the memory",
    "zb-v": "two chunks a stage, down and back up: hardly a bubble in the memory of 1f1b",
}


def schedule(kind: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name for a pipeline of `stages` ranks.

    chunks: parts of the model on each stage; interleaved takes 2 or more (2 when not given), zb-v 2, the others 1.
    Raises UserError for an unknown name, and when there are too few micro-batches for it.
    """
    chunks = _checked(kind, stages, micro_batches, chunks)
    return Schedule(
        kind=kind,
        micro_batches=micro_batches,
        orders=tuple(tuple(_order(kind, stage, stages, micro_batches, chunks)) for stage in range(stages)),
        chunks=chunks,
        placement="v" if kind == "zb-v" else "loop",
    )


def _order(kind: str, stage: int, stages: int, micro_batches: int, chunks: int) -> list[Op]:
    match kind:
        case "gpipe":
            return rules.gpipe(stage, stages, micro_batches)
        case "1f1b":
            return rules.one_f_one_b(stage, stages, micro_batches)
        case "interleaved":
            return rules.interleaved(stage, stages, micro_batches, chunks)
        case "zb-h1":
            return rules.zb_h(stage, stages, micro_batches, depth=1)
        case "zb-h2":
            return rules.zb_h(stage, stages, micro_batches, depth=2)
    return rules.zb_v(stage, stages, micro_batches)


def _checked(kind: str, stages: int, micro_batches: int, chunks: int | None) -> int:
    """How many chunks it is. Raises UserError, which says the nearest that works."""
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"there is no schedule {kind!r}; {guess}possible: {', '.join(KINDS)}.")
    for name, number in (("stages", stages), ("micro-batches", micro_batches)):
        if number < 1:
            raise UserError(f"{kind} was asked for {number} {name}; a pipeline has at least 1. Give 1 or more {name}.")
    fixed = {"interleaved": None, "zb-v": 2}.get(kind, 1)
    if chunks is None:
        chunks = fixed or 2
    if (fixed and chunks != fixed) or chunks < 1 or (kind == "interleaved" and chunks < 2):
        takes = f"{fixed} chunk{'s' * (fixed > 1)}" if fixed else "2 chunks or more"
        other = "" if kind == "interleaved" else ", or take interleaved"
        raise UserError(f"{kind} has {takes} a stage, and was given {chunks}: leave the chunks out{other}.")
    if kind == "interleaved" and micro_batches % stages:
        low = micro_batches // stages * stages
        near = f"{low} or {low + stages}" if low else f"{stages}"
        raise UserError(
            f"interleaved sends micro-batches through its chunks in groups of as many as there are stages: "
            f"{micro_batches} micro-batches are no multiple of {stages} stages. Give {near} micro-batches, or take "
            f"1f1b."
        )
    if kind == "zb-h2" and micro_batches < 2 * stages - 1:
        fits = (micro_batches + 1) // 2
        raise UserError(
            f"zb-h2 has 2 x {stages} stages - 1 = {2 * stages - 1} micro-batches in flight, and was given "
            f"{micro_batches}: give {2 * stages - 1} micro-batches or more, {fits} stage{'s' * (fits > 1)} or fewer, "
            f"or take zb-h1."
        )
    return chunks
