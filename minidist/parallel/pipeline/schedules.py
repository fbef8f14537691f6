"""The published pipeline schedules: `build_schedule(kind, stages, micro_batches)`.

Each schedule is a rule that returns one stage's actions. A rule is a list of phases: a pattern and its number of
repeats, as ("F B", 3) for F B F B F B. Each F takes the next micro-batch of all F, each B the next of all B, and each W
the oldest B whose weight gradient is still to be computed. Actions without a micro-batch left are skipped, so the
last phases may have more repeats than needed.
"""

from collections import deque
from collections.abc import Sequence

from minidist.config import Config
from minidist.mesh import Mesh
from minidist.parallel.pipeline.actions import Action, Schedule
from minidist.validation import validate_pipeline, validate_schedule


def build_schedule(kind: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Build schedule `kind` (one of `validation.SCHEDULES`) for a pipeline of `stages` ranks.

    chunks: parts of the model on each stage: 2 or more for interleaved (default 2), 2 for zb-v, 1 for the others.
    Raises UserError for an unknown name, or if the schedule needs more micro-batches.
    """
    chunks = validate_schedule(kind, stages, micro_batches, chunks)
    return Schedule(
        kind=kind,
        micro_batches=micro_batches,
        orders=tuple(tuple(_stage_order(kind, stage, stages, micro_batches, chunks)) for stage in range(stages)),
        num_chunks=chunks,
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


def _stage_order(kind: str, stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Return the actions of one stage, in order. Arguments as in `build_schedule`, validated; stage: its index."""
    match kind:
        case "gpipe":
            return gpipe(stage, stages, micro_batches)
        case "1f1b":
            return one_f_one_b(stage, stages, micro_batches)
        case "interleaved":
            return interleaved(stage, stages, micro_batches, chunks)
        case "zb-h1":
            return zb_h(stage, stages, micro_batches, depth=1)
        case "zb-h2":
            return zb_h(stage, stages, micro_batches, depth=2)
    return zb_v(stage, stages, micro_batches)


# -- the rules ---------------------------------------------------------------------------------------------------------

Phases = Sequence[tuple[str, int]]


def expand_phases(phases: Phases, **queues: Sequence[tuple[int, int]]) -> list[Action]:
    """Return a stage's actions in order, from phases (pattern, repeats): ("F B", 3) stands for F B F B F B.

    queues: for each word of the patterns except W, a keyword argument such as F=[(0, 0), (1, 0)]: the (micro-batch,
    chunk) pairs of its occurrences, in order. Occurrences without a pair are skipped. A W takes the pair of the
    earliest B that has had no W yet.
    """
    waiting = {word: deque(pairs) for word, pairs in queues.items()} | {"W": deque()}
    actions = []
    for word in (word for pattern, repeats in phases for word in pattern.split() * repeats):
        if waiting[word]:
            pair = waiting[word].popleft()
            actions.append(Action(word[0], *pair))
            if word[0] == "B":
                waiting["W"].append(pair)
    return actions


def micro_batch_order(micro_batches: int, chunk: int = 0) -> list[tuple[int, int]]:
    """Return the pairs (0, chunk), (1, chunk), ... of all micro-batches: a queue for `expand_phases`."""
    return [(micro_batch, chunk) for micro_batch in range(micro_batches)]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe: one forward per micro-batch, then one backward per micro-batch.

    stage: the index of the stage whose actions are returned. stages, micro_batches: how many there are.
    All micro-batches are in flight when the first backward begins.
    Huang et al. 2019, section 2.2 and figure 2.
    """
    queue = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=queue, B=queue)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B: warm-up forwards until the first micro-batch returns, then one backward after each forward.

    Stage s has at most min(stages - s, micro_batches) micro-batches in flight.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    queue = micro_batch_order(micro_batches)
    return expand_phases([("F", stages - 1 - stage), ("F B", micro_batches)], F=queue, B=queue)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Interleaved 1F1B: several chunks per stage, which shrinks the bubble.

    Micro-batches are processed in groups of `stages`, which run chunk 0, then chunk 1, and so on; backward in reverse.
    Narayanan et al. 2021, section 2.2.2; there micro_batches must be a multiple of stages.
    """
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [(m, chunk) for group in groups for chunk in range(chunks) for m in group]
    backward = [(m, chunk) for group in groups for chunk in reversed(range(chunks)) for m in group]
    early = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return expand_phases([("F", early), ("F B", len(forward))], F=forward, B=backward)


def zb_h(stage: int, stages: int, micro_batches: int, depth: int) -> list[Action]:
    """ZB-H1 (depth 1) and ZB-H2 (depth 2): 1F1B with weight gradients deferred to fill the last bubble.

    The stage k places before the last runs depth * k warm-up forwards; stage k defers depth * k weight gradients. All
    stages have the same number of micro-batches in flight: `stages` in ZB-H1, `2 * stages - 1` in ZB-H2.
    Qi et al. 2023, sections 2.1 and 2.2, figure 3; remaining bubbles: table 2.
    """
    queue = micro_batch_order(micro_batches)
    early, late = depth * (stages - 1 - stage), depth * stage
    phases = [("F", early), ("F B", late), ("F B W", micro_batches), ("W", late)]
    return expand_phases(phases, F=queue, B=queue)


def zb_v(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """ZB-V: two chunks per stage, placed as a V, so that stage 0 holds both the first and the last part.

    Needs the memory of 1F1B and, if F, B and W take the same time, has no bubble. Qi et al. 2023, section 6 and figure
    8: 2 * stages - 1 forwards on every stage, then F, B and W of chunk 1 and chunk 0 alternately, and at the end the
    remaining B, with W in the gaps.
    """
    ahead = stages - stage  # stages from this one to the last, itself included
    enough = max(micro_batches, 2 * stages - 1)
    phases = [
        ("F0", 2 * ahead - 1),
        ("F1 F0", stage),
        ("F1 B1 W", ahead),
        ("F0 B0 W F1 B1 W", enough - stages),
        ("B0 B1", stage),
        ("B0 W", ahead),
        ("W", 2 * stage),
    ]
    down, up = micro_batch_order(micro_batches, 0), micro_batch_order(micro_batches, 1)
    return expand_phases(phases, F0=down, B0=down, F1=up, B1=up)
