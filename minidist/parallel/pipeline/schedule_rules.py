"""The published pipeline schedules, each as a rule that returns one stage's operations.

A rule is a list of phases: a pattern and its number of repeats, as ("F B", 3) for F B F B F B. Each F takes the next
micro-batch of all F, each B the next of all B, and each W the oldest B whose weight gradient is still to be computed.
Operations without a micro-batch left are skipped, so the last phases may have more repeats than needed.
"""

from collections import deque
from collections.abc import Sequence

from minidist.parallel.pipeline.actions import Op

Phases = Sequence[tuple[str, int]]


def expand_phases(phases: Phases, **turns: Sequence[tuple[int, int]]) -> list[Op]:
    """Expand phases to operations. turns: for each word except W, its (micro-batch, chunk) pairs, in order."""
    waiting = {word: deque(pairs) for word, pairs in turns.items()} | {"W": deque()}
    ops = []
    for word in (word for pattern, repeats in phases for word in pattern.split() * repeats):
        if waiting[word]:
            pair = waiting[word].popleft()
            ops.append(Op(word[0], *pair))
            if word[0] == "B":
                waiting["W"].append(pair)
    return ops


def micro_batch_order(micro_batches: int, chunk: int = 0) -> list[tuple[int, int]]:
    """Return the (micro-batch, chunk) pairs of one chunk, in ascending order."""
    return [(micro_batch, chunk) for micro_batch in range(micro_batches)]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """GPipe: all forwards, then all backwards; all micro-batches are in flight when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=turns, B=turns)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """1F1B: warm-up forwards until the first micro-batch returns, then one backward after each forward.

    Stage s has at most min(stages - s, micro_batches) micro-batches in flight.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", stages - 1 - stage), ("F B", micro_batches)], F=turns, B=turns)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Op]:
    """Interleaved 1F1B: several chunks per stage, which shrinks the bubble.

    Micro-batches are processed in groups of `stages`, which run chunk 0, then chunk 1, and so on; backward in reverse.
    Narayanan et al. 2021, section 2.2.2; there micro_batches must be a multiple of stages.
    """
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [(m, chunk) for group in groups for chunk in range(chunks) for m in group]
    backward = [(m, chunk) for group in groups for chunk in reversed(range(chunks)) for m in group]
    early = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return expand_phases([("F", early), ("F B", len(forward))], F=forward, B=backward)


def zb_h(stage: int, stages: int, micro_batches: int, depth: int) -> list[Op]:
    """ZB-H1 (depth 1) and ZB-H2 (depth 2): 1F1B with weight gradients deferred to fill the last bubble.

    A stage k places before the last runs depth * k warm-up forwards; stage k defers depth * k weight gradients. All
    stages have the same number of micro-batches in flight: `stages` in ZB-H1, `2 * stages - 1` in ZB-H2.
    Qi et al. 2023, sections 2.1 and 2.2, figure 3; remaining bubbles: table 2.
    """
    turns = micro_batch_order(micro_batches)
    early, late = depth * (stages - 1 - stage), depth * stage
    phases = [("F", early), ("F B", late), ("F B W", micro_batches), ("W", late)]
    return expand_phases(phases, F=turns, B=turns)


def zb_v(stage: int, stages: int, micro_batches: int) -> list[Op]:
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
