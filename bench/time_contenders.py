"""The rank's side of a benchmark: check each contender against a single process, then time the contenders in turns."""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.contenders import Contender, ContenderContext
from bench.workload import RankBatch, Workload
from minidist.comm import Group, GroupSpec, World, all_gather_object, barrier, bind
from minidist.errors import RunError
from minidist.mesh import Mesh

# Relative, float32. Splitting the batch over 2 or 4 ranks changes gradients by 7e-7, a wrong divisor by 1e-2 or more.
TOLERANCE = 1e-5
CHECKED_STEPS = 3
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after its first step, and AdamW allocates its state in it


class Trainable(Protocol):
    """An object that trains for one step on a batch of any type."""

    def step(self, batch) -> object: ...


class TurnTiming(NamedTuple):
    """One turn of a contender on one rank, in seconds: start and end on the machine's monotonic clock, and CPU time of
    all threads of the rank."""

    start_s: float
    end_s: float
    cpu_s: float


class RankTimings(NamedTuple):
    """Results of one rank, by contender.

    timings: one `TurnTiming` per round. kernels: the optimizer's class and kernel. max_relative_errors: the largest
    relative difference from a single process.
    """

    timings: dict[str, list[TurnTiming]]
    kernels: dict[str, str]
    max_relative_errors: dict[str, float]


def check_and_time(
    world: World,
    makers: Mapping[str, Callable[[ContenderContext], Contender]],
    work: Workload,
    mode: str,
    rounds: int,
    steps: int,
) -> RankTimings:
    """Check all contenders against a single process, then time `rounds` turns of `steps` training steps for each.

    makers: by the contender's name, the function that builds it. mode: "full" or "bare" (see `contenders`). Raises
    RunError if a contender differs by more than TOLERANCE, as it would not do the same work.
    """
    group = bind(world, Mesh(dp=world.size), [GroupSpec("bench", ("dp",))])["bench"]
    batches = work.rank_batches(world.rank, world.size)
    context = ContenderContext(work, mode, world)
    contenders = {name: make(context) for name, make in makers.items()}
    references = single_process_steps(work)
    errors = {
        name: max_relative_error(name, contender, batches, references, group)
        for name, contender in contenders.items()
        if contender.exact
    }
    timings = time_in_turns(contenders, batches, group, rounds, steps)
    kernels = {name: contender.kernel for name, contender in contenders.items()}
    return RankTimings(timings, kernels, errors)


def time_in_turns(
    contenders: Mapping[str, Trainable], batches: Sequence, group: Group, rounds: int, steps: int
) -> dict[str, list[TurnTiming]]:
    """Warm up, then give each contender one turn of `steps` training steps per round, in random order.

    The order is the same on all ranks. Returns one timing per round, by contender.
    """
    for contender in contenders.values():
        time_turn(contender, batches[:WARM_UP_STEPS], group)
    timings: dict[str, list[TurnTiming]] = {name: [] for name in contenders}
    for number in range(rounds):
        turn_batches = [batches[(number * steps + i) % len(batches)] for i in range(steps)]
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            timings[name].append(time_turn(contenders[name], turn_batches, group))
    return timings


def time_turn(contender: Trainable, batches: Sequence, group: Group) -> TurnTiming:
    """Time one training step per batch, after a barrier. Python's garbage collection runs before, never during it."""
    gc.collect()
    gc.disable()
    barrier(group)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    for batch in batches:
        contender.step(batch)
    timing = TurnTiming(start_s, time.monotonic(), time.process_time() - start_cpu_s)
    gc.enable()
    return timing


class ReferenceStep(NamedTuple):
    """Results of one training step on a single process: loss, gradient norm before clipping, gradients by name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def single_process_steps(work: Workload) -> list[ReferenceStep]:
    """Take the first CHECKED_STEPS training steps on one process: whole global batches, torch's own clipping."""
    model, loader, steps = work.build_model(), work.build_loader(), []
    optimizer = work.build_adamw(model.parameters())
    for i in range(CHECKED_STEPS):
        batch = loader.global_batch(i * work.global_batch, work.global_batch)
        loss_sum, count = model(batch.tokens, batch.labels)
        loss = loss_sum / count
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), work.clip_norm)
        steps.append(ReferenceStep(loss.item(), norm.item(), gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps


def max_relative_error(
    name: str, contender: Contender, batches: Sequence[RankBatch], references: Sequence[ReferenceStep], group: Group
) -> float:
    """Return the largest relative difference of a contender's first steps from a single process, over all ranks.

    Compares each gradient of the first step, as max|a - b| / max|b|, and in mode "full" the loss and gradient norm of
    every step, which reveal a wrong update too. Gradients of later steps are not compared: AdamW turns a last-bit
    difference of a gradient near zero into a full-sized update. Raises RunError if the error exceeds TOLERANCE or if
    no rank has the gradient of some parameter.
    """
    worst, compared = 0.0, []
    for i, reference in enumerate(references):

        def compare(gradients: dict[str, Tensor], reference=reference, first=i == 0) -> None:
            nonlocal worst
            for key, grad in gradients.items() if first else ():
                expected = reference.gradients[key]
                worst = max(worst, ((grad - expected).abs().max() / expected.abs().max()).item())
                compared.append(key)

        loss_and_norm = contender.step(batches[i], compare)
        for got, expected in zip(loss_and_norm or (), (reference.loss, reference.grad_norm), strict=False):
            worst = max(worst, abs(got - expected) / abs(expected))
    by_rank = all_gather_object((worst, compared), group)
    worst = max(error for error, _ in by_rank)
    absent = references[0].gradients.keys() - {key for _, keys in by_rank for key in keys}
    if absent or not worst <= TOLERANCE:
        problem = f"has no gradient of {sorted(absent)[0]}" if absent else f"is {worst:.1e} off a single process"
        raise RunError(f"{name} {problem} on {group.size} ranks (tolerance {TOLERANCE:g}), so it is not timed")
    return worst
