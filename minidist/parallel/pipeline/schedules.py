"""Build a pipeline schedule by name: `build_schedule(kind, stages, micro_batches)`."""

from minidist.config import Config
from minidist.mesh import Mesh
from minidist.parallel.pipeline import schedule_rules as rules
from minidist.parallel.pipeline.actions import Op, Schedule
from minidist.validation import validate_pipeline, validate_schedule

KINDS = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward: the memory of `stages` micro-batches at most",
    "interleaved": "1f1b over several chunks of the model a stage: a smaller bubble, more transfers",
    "zb-h1": "1f1b with the backward in two halves: a third of the bubble",
    "zb-h2": "more forwards first: hardly a bubble, twice the memory",
    "zb-v": "two chunks a stage, down and back up: hardly a bubble in the memory of 1f1b",
}


def build_schedule(kind: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Build schedule `kind` (a key of KINDS) for a pipeline of `stages` ranks.

    chunks: parts of the model on each stage: 2 or more for interleaved (default 2), 2 for zb-v, 1 for the others.
    Raises UserError for an unknown name, or if the schedule needs more micro-batches.
    """
    chunks = validate_schedule(kind, stages, micro_batches, chunks)
    return Schedule(
        kind=kind,
        micro_batches=micro_batches,
        orders=tuple(tuple(_order(kind, stage, stages, micro_batches, chunks)) for stage in range(stages)),
        chunks=chunks,
        placement="v" if kind == "zb-v" else "loop",
    )


def pipeline_schedule(config: Config, mesh: Mesh) -> Schedule | None:
    """Return the pipeline schedule of a run, or None if it has one stage.

    Raises UserError if the model has too few layers, or the step too few micro-batches.
    """
    if mesh.pp == 1:
        return None
    validate_pipeline(config, mesh)
    return build_schedule(config.parallel.schedule, mesh.pp, config.train.micro_batches, config.parallel.chunks)


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
