"""What runs on every rank: prove that the contenders compute the same, then let them take turns."""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.contenders import Contender, ContenderContext
from bench.workload import Share, Workload
from minidist.comm import Group, GroupSpec, World, all_gather_object, barrier, bind
from minidist.errors import RunError
from minidist.mesh import Mesh

# float32: a batch cut in two or four gives gradients 7e-7 apart; ten times that, and a wrong divisor is 1e-2 and more.
TOLERANCE = 1e-5
CHECKED_STEPS = 3
WARM_UP_STEPS = 3  # DDP lays out its buckets anew after its first step, and AdamW makes its state


class Stepping(Protocol):
    """Whatever takes one step of what it is given."""

    def step(self, share) -> object: ...


class Span(NamedTuple):
    """One turn: start and end on this machine's monotonic clock, and CPU time of all threads of the rank, in s."""

    start_s: float
    end_s: float
    cpu_s: float


class Turns(NamedTuple):
    """From one rank. spans: name to a `Span` per round.

    kernels: name to optimizer kernel. agreement: name to the largest relative difference to one process.
    """

    spans: dict[str, list[Span]]
    kernels: dict[str, str]
    agreement: dict[str, float]


def run(
    world: World,
    makers: Mapping[str, Callable[[ContenderContext], Contender]],
    work: Workload,
    mode: str,
    rounds: int,
    steps: int,
) -> Turns:
    """Check every contender against one process, warm up, and time `rounds` turns of `steps` steps for each.

    Raises RunError when a contender is off by more than TOLERANCE: it would be timed at another task.
    """
    table = bind(world, Mesh(dp=world.size), [GroupSpec("bench", ("dp",))])["bench"]
    shares = work.batches(world.rank, world.size)
    context = ContenderContext(work, mode, world)
    contenders = {name: make(context) for name, make in makers.items()}
    wanted = one_process(work)
    agreement = {
        name: agree(name, contender, shares, wanted, table) for name, contender in contenders.items() if contender.exact
    }
    spans = take_turns(contenders, shares, table, rounds, steps)
    kernels = {name: contender.kernel for name, contender in contenders.items()}
    return Turns(spans, kernels, agreement)


def take_turns(
    contenders: Mapping[str, Stepping], shares: Sequence, table: Group, rounds: int, steps: int
) -> dict[str, list[Span]]:
    """Warm up, then in every round one turn of `steps` steps for each, in an order that changes."""
    for contender in contenders.values():
        turn(contender, shares[:WARM_UP_STEPS], table)
    spans: dict[str, list[Span]] = {name: [] for name in contenders}
    for number in range(rounds):
        mine = [shares[(number * steps + i) % len(shares)] for i in range(steps)]
        for name in random.Random(number).sample(list(contenders), len(contenders)):  # the same order on every rank
            spans[name].append(turn(contenders[name], mine, table))
    return spans


def turn(contender: Stepping, shares: Sequence, table: Group) -> Span:
    """One step per share after all ranks have met. Python's garbage is collected before, not within."""
    gc.collect()
    gc.disable()
    barrier(table)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    for share in shares:
        contender.step(share)
    span = Span(start_s, time.monotonic(), time.process_time() - start_cpu_s)
    gc.enable()
    return span


class Step(NamedTuple):
    """What a step must give."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def one_process(work: Workload) -> list[Step]:
    """The first steps as one process takes them: the whole batch at once, torch's own clipping."""
    model, loader, steps = work.build(), work.loader(), []
    optimizer = work.adamw(model.parameters())
    for i in range(CHECKED_STEPS):
        batch = loader.global_batch(i * work.global_batch, work.global_batch)
        loss_sum, count = model(batch.tokens, batch.labels)
        loss = loss_sum / count
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), work.clip_norm)
        steps.append(Step(loss.item(), norm.item(), gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps


def agree(name: str, contender: Contender, shares: Sequence[Share], wanted: Sequence[Step], table: Group) -> float:
    """The largest relative difference between a contender's first steps and those of one process, over all ranks.

    Compared are each gradient of the first step, as max|a - b| / max|b|, and in mode full loss and norm of every step:
    they show a wrong update too. (Later gradients are not: AdamW turns the last bit of a gradient near zero into a
    whole step.) Between them the ranks must hold every gradient.
    """
    worst, held = 0.0, []
    for i, want in enumerate(wanted):

        def compare(gradients: dict[str, Tensor], want=want, first=i == 0) -> None:
            nonlocal worst
            for key, grad in gradients.items() if first else ():
                off = (grad - want.gradients[key]).abs().max() / want.gradients[key].abs().max()
                worst = max(worst, off.item())
                held.append(key)

        numbers = contender.step(shares[i], compare)
        for got, expected in zip(numbers or (), (want.loss, want.grad_norm), strict=False):
            worst = max(worst, abs(got - expected) / abs(expected))
    seen = all_gather_object((worst, held), table)
    worst = max(off for off, _ in seen)
    absent = wanted[0].gradients.keys() - {key for _, keys in seen for key in keys}
    if absent or not worst <= TOLERANCE:
        what = f"has no gradient of {sorted(absent)[0]}" if absent else f"is {worst:.1e} off one process"
        raise RunError(f"{name} {what} on {table.size} ranks (tolerance {TOLERANCE:g}): it is not timed")
    return worst
