"""The schedules of the literature: each is a rule that gives one stage its operations.

A rule is a list of phases, and a phase a pattern and how often it repeats: ("F B", 3) is F B F B F B. Each F and B of a
pattern takes the next micro-batch of its own, each W the oldest backward whose weight half is still to do; what finds
nothing is passed over. So the last phases may ask for more than there is.
"""

from collections import deque
from collections.abc import Sequence

from minidist.parallel.pipeline.actions import Op

Phases = Sequence[tuple[str, int]]


def expand_phases(phases: Phases, **turns: Sequence[tuple[int, int]]) -> list[Op]:
    """The operations the phases spell. turns: for every word but W, the (micro-batch, chunk) it takes, in order."""
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
    """One chunk's micro-batches, from the first to the last."""
    return [(micro_batch, chunk) for micro_batch in range(micro_batches)]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """All forwards, then all backwards; every micro-batch is alive when the first backward begins.

    Huang et al. 2019, section 2.2 and figure 2.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", micro_batches), ("B", micro_batches)], F=turns, B=turns)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Forwards until the first micro-batch comes back, from then on a backward after each forward.

    Stage s has min(stages - s, micro_batches) micro-batches alive, however many there are.
    Narayanan et al. 2019, section 3.2; with a flush at the end of a step: Narayanan et al. 2021, section 2.2.1.
    """
    turns = micro_batch_order(micro_batches)
    return expand_phases([("F", stages - 1 - stage), ("F B", micro_batches)], F=turns, B=turns)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Op]:
    """1F1B over several chunks a stage: the first bubble is filled with work of the next chunk.

    Micro-batches go in groups of `stages`, which pass through chunk 0, then chunk 1, and so on; backward the other way.
    Narayanan et al. 2021, section 2.2.2, which needs a whole number of groups.
    """
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [(m, chunk) for group in groups for chunk in range(chunks) for m in group]
    backward = [(m, chunk) for group in groups for chunk in reversed(range(chunks)) for m in group]
    early = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return expand_phases([("F", early), ("F B", len(forward))], F=forward, B=backward)


def zb_h(stage: int, stages: int, micro_batches: int, depth: int) -> list[Op]:
    """ZB-H1 (depth 1) and ZB-H2 (depth 2): 1F1B whose weight halves start late, and so fill the last bubble.

    A stage k places from the end runs depth * k forwards early; one k places from the beginning keeps depth * k weight
    halves back. Every stage then has as many micro-batches alive: stages, or 2 * stages - 1.
    Qi et al. 2023, sections 2.1 and 2.2, figure 3; the bubbles that are left: table 2.
    """
    turns = micro_batch_order(micro_batches)
    early, late = depth * (stages - 1 - stage), depth * stage
    phases = [("F", early), ("F B", late), ("F B W", micro_batches), ("W", late)]
    return expand_phases(phases, F=turns, B=turns)


def zb_v(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """Two chunks a stage, placed as a V: the first backward begins where the last forward ends, on stage 0.

    The memory of 1F1B and, when F, B and W take the same time, no bubble. Qi et al. 2023, section 6 and figure 8:
    2 * stages - 1 forwards on every stage, then forward, backward and weight half of chunk 1 or of chunk 0 in turns,
    and at the end backwards first, with weight halves in what would be bubbles.
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
