"""Tests of replica_merger: replicas of several tensors, against a loop over all replicas in one process, in float64."""

import math

import torch
from torch import nn

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, check_conditions, exact
from exercises.testing import CONDITION_RANKS, expect, test
from minidist.comm import all_gather_object
from minidist.config import ConsistencyConfig

SHAPES = {"matrix": (2, 3), "vector": (4,), "number": ()}
LENGTHS = ((1, 3), (2, 5), (3, 6), (5, 3))  # h and the number of steps
SETTINGS = ((0.7, 0.9), (0.5, 0.3), (1.0, 0.0))  # of the outer step


def config_of(mode, h, lr=0.7, momentum=0.9):
    return ConsistencyConfig(mode=mode, h=h, outer_lr=lr, outer_momentum=momentum)


def first(dtype=torch.float64):
    """The masters of every replica at the start."""
    return {
        name: torch.linspace(-1, 2, math.prod(shape), dtype=dtype).view(shape) + i
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def make_masters(dtype=torch.float64):
    return {name: nn.Parameter(tensor) for name, tensor in first(dtype).items()}


def optimizer_step(masters, rank, step):
    """What the inner optimizer of a replica does in a step, in place."""
    for number, master in enumerate(masters.values()):
        master.data.mul_(1 - 0.1 / (rank + 1)).add_(0.25 * (step + 1) * (rank + 1) - number)


def usual_tokens(rank, step):
    """Another number on every replica and in every step; one step is skipped on all replicas."""
    return 0.0 if step == 2 else 100.0 * (rank + 1) + 7 * step


def is_due(step, h, num_steps):
    return (step + 1) % h == 0 or step == num_steps - 1


def one_process(size, h, num_steps, tokens, outer=None):
    """The masters of all replicas after every step. outer: (lr, momentum) of DiLoCo; None: local SGD."""
    replicas, seen = [first() for _ in range(size)], []
    start, velocity = first(), {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    counts = [0.0] * size
    for step in range(num_steps):
        for rank, replica in enumerate(replicas):
            if tokens(rank, step):
                optimizer_step(replica, rank, step)
            counts[rank] += tokens(rank, step)
        if is_due(step, h, num_steps) and sum(counts):
            for name in SHAPES:
                weighted = [count * replica[name] for count, replica in zip(counts, replicas, strict=True) if count]
                mean = sum(weighted) / sum(counts)
                if outer:
                    difference = start[name] - mean
                    velocity[name] = outer[1] * velocity[name] + difference
                    mean = start[name] - outer[0] * (difference + outer[1] * velocity[name])
                    start[name] = mean
                for replica in replicas:
                    replica[name] = mean.clone()
            counts = [0.0] * size
        seen.append([{name: tensor.clone() for name, tensor in replica.items()} for replica in replicas])
    return seen, {"outer.start": start, "outer.velocity": velocity}


def train(answer, world, network, config, num_steps, tokens=usual_tokens, check=None):
    """A run of this replica. check: called after every step with the step, what `after_step` has returned, and both."""
    masters = make_masters()
    merger = answer.ReplicaMerger(config, masters, network.group, num_steps)
    returned = []
    for step in range(num_steps):
        count = tokens(world.rank, step)
        if count:
            optimizer_step(masters, world.rank, step)
        returned.append(merger.after_step(step, count))
        if check:
            check(step, merger, masters)
    return returned, merger, masters


def comparison(expected, rank, case):
    """A check that compares the masters of a replica with those of one process."""

    def check(step, merger, masters):
        for name, master in masters.items():
            expect(
                f"{name}, after step {step}", master.detach(), expected[step][rank][name], case=case, tolerance=1e-12
            )

    return check


@test(points=4, ranks=(1, 2, 3))
def merges_every_h_steps_and_after_the_last(answer, world, network):
    """Mode "local": after every step the masters are those of one process; `after_step` returns if it has merged."""
    for h, num_steps in LENGTHS:
        case = f'mode "local", h {h}, {num_steps} steps'
        expected, _ = one_process(world.size, h, num_steps, usual_tokens)
        check = comparison(expected, world.rank, case)
        returned, _, _ = train(answer, world, network, config_of("local", h), num_steps, check=check)
        # With h = 1 no replica has tokens in step 2.
        due = [is_due(step, h, num_steps) and (h > 1 or step != 2) for step in range(num_steps)]
        expect("what after_step returns in each step", returned, due, case=case)


@test(points=4, ranks=(1, 2, 3))
def outer_steps_in_mode_diloco(answer, world, network):
    """Mode "diloco": each merge is an outer step of every master, with the rate and momentum of the configuration."""
    for lr, momentum in SETTINGS:
        for h, num_steps in LENGTHS[1:3]:
            case = f'mode "diloco", lr {lr}, momentum {momentum}, h {h}, {num_steps} steps'
            expected, _ = one_process(world.size, h, num_steps, usual_tokens, (lr, momentum))
            check = comparison(expected, world.rank, case)
            config = config_of("diloco", h, lr, momentum)
            train(answer, world, network, config, num_steps, check=check)


@test(points=3, ranks=(2, 3))
def replica_without_tokens(answer, world, network):
    """A replica without tokens since the last merge does not count, even if its masters are NaN."""

    def tokens(rank, step):
        return 0.0 if rank == world.size - 1 and step < 2 else 10.0 + step

    for mode in ("local", "diloco"):
        outer = (0.7, 0.9) if mode == "diloco" else None
        expected, _ = one_process(world.size, 2, 4, tokens, outer)
        masters = make_masters()
        merger = answer.ReplicaMerger(config_of(mode, 2), masters, network.group, 4)
        for step in range(4):
            count = tokens(world.rank, step)
            if count:
                optimizer_step(masters, world.rank, step)
            elif step == 1:
                for master in masters.values():
                    master.data.fill_(math.nan)
            merger.after_step(step, count)
            if step % 2:
                case = f'mode "{mode}", h 2; rank {world.size - 1} has no tokens in steps 0 and 1, and NaN masters'
                comparison(expected, world.rank, case)(step, merger, masters)


@test(points=3, ranks=(1, 2, 3))
def round_without_tokens(answer, world, network):
    """If no replica has tokens since the last merge, nothing changes, and `after_step` returns False."""

    def tokens(rank, step):
        return 0.0 if step in (2, 3) else 8.0 * (rank + 1)

    for mode in ("local", "diloco"):
        outer = (0.7, 0.9) if mode == "diloco" else None
        case = f'mode "{mode}", h 2; no tokens in steps 2 and 3'
        expected, _ = one_process(world.size, 2, 6, tokens, outer)
        check = comparison(expected, world.rank, case)
        returned, _, _ = train(answer, world, network, config_of(mode, 2), 6, tokens, check)
        expect("what after_step returns in each step", returned, [False, True, False, False, False, True], case=case)


@test(points=2, ranks=(1, 2, 3))
def counts_between_merges(answer, world, network):
    """num_tokens and num_different_models are right after every step, and before the first one."""

    def tokens(rank, step):
        return 0.0 if step in (2, 3) else 8.0 * (rank + 1) + step

    fresh = answer.ReplicaMerger(config_of("local", 2), make_masters(), network.group, 7)
    counts, models = [fresh.num_tokens.tolist()], [fresh.num_different_models]
    expect("the dtype of num_tokens", str(fresh.num_tokens.dtype), "torch.float64")

    def check(step, merger, masters):
        counts.append(merger.num_tokens.tolist())
        expect(f"the dtype of num_tokens after step {step}", str(merger.num_tokens.dtype), "torch.float64")
        models.append(merger.num_different_models)

    train(answer, world, network, config_of("local", 2), 7, tokens, check)
    mine = [8.0 * (world.rank + 1) + step for step in range(7)]
    case = "h 2, 7 steps, no tokens in steps 2 and 3"
    expected = [[0.0], [mine[0]], [0.0], [0.0], [0.0], [mine[4]], [0.0], [0.0]]
    expect("num_tokens at the start and after each step", counts, expected, case=case)
    several = world.size
    expected = [1, several, 1, several, 1, several, 1, 1]
    expect("num_different_models at the start and after each step", models, expected, case=case)


@test(points=2, ranks=(1, 2, 3))
def states_of_the_outer_steps(answer, world, network):
    """outer_states() has the start and the velocity of every master, equal on all replicas; none in mode "local"."""
    fresh = answer.ReplicaMerger(config_of("diloco", 2), make_masters(), network.group, 4).outer_states()
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    expect("outer_states() before the first step", fresh, {"outer.start": first(), "outer.velocity": zeros})
    _, expected = one_process(world.size, 2, 4, usual_tokens, (0.7, 0.9))
    _, merger, masters = train(answer, world, network, config_of("diloco", 2), 4)
    states = merger.outer_states()
    expect("the kinds of states", sorted(states), ["outer.start", "outer.velocity"])
    for kind, tensors in expected.items():
        expect(f"the names in {kind}", sorted(states[kind]), sorted(SHAPES))
        for name, tensor in tensors.items():
            expect(f"{kind} of {name}", states[kind][name], tensor, tolerance=1e-12)
            every = all_gather_object(states[kind][name].tolist(), network.group)
            expect(f"{kind} of {name} beside rank 0's", every[world.rank], every[0])
    for master in masters.values():
        master.data.add_(100)
    what = "outer.start of vector, after another optimizer step"
    expect(what, merger.outer_states()["outer.start"]["vector"], expected["outer.start"]["vector"], tolerance=1e-12)
    _, merger, _ = train(answer, world, network, config_of("local", 2), 2)
    expect('outer_states() in mode "local"', merger.outer_states(), {"outer.start": {}, "outer.velocity": {}})


@test(points=2, ranks=(2, 3))
def goes_on_from_a_checkpoint(answer, world, network):
    """A second run whose num_tokens, states and masters are overwritten in place goes on like the first one."""
    for mode, saved_after in (("diloco", 3), ("diloco", 4), ("local", 3), ("diloco", 5)):
        config, saved = config_of(mode, 3), {}

        def save(step, merger, masters, saved=saved, saved_after=saved_after):
            if step == saved_after:
                saved["tokens"] = merger.num_tokens.clone()
                states = merger.outer_states().items()
                saved["states"] = {kind: {n: t.clone() for n, t in tensors.items()} for kind, tensors in states}
                saved["masters"] = {name: master.detach().clone() for name, master in masters.items()}

        train(answer, world, network, config, 10, check=save)
        expected, _ = one_process(world.size, 3, 10, usual_tokens, (0.7, 0.9) if mode == "diloco" else None)
        masters = make_masters()
        merger = answer.ReplicaMerger(config, masters, network.group, 10)
        merger.num_tokens.copy_(saved["tokens"])
        for name, master in masters.items():
            master.data.copy_(saved["masters"][name])
            for kind, tensors in saved["states"].items():
                if name in tensors:
                    merger.outer_states()[kind][name].copy_(tensors[name])
        case = f'mode "{mode}", h 3, 10 steps; saved after step {saved_after}, loaded into a new ReplicaMerger'
        check = comparison(expected, world.rank, case)
        for step in range(saved_after + 1, 10):
            optimizer_step(masters, world.rank, step)
            returned = merger.after_step(step, usual_tokens(world.rank, step))
            expect(f"what after_step returns in step {step}", returned, is_due(step, 3, 10), case=case)
            check(step, merger, masters)


@test(points=2, ranks=(2, 3))
def sends_in_merges_only(answer, world, network):
    """Between merges nothing is sent; a merge all-reduces each master once, in its dtype, and a few bytes besides."""
    for mode in ("local", "diloco"):
        for dtype in (torch.float32, torch.bfloat16):
            masters = {name: nn.Parameter(torch.zeros(size, dtype=dtype)) for name, size in (("a", 1000), ("b", 200))}
            merger = answer.ReplicaMerger(config_of(mode, 2), masters, network.group, 4)
            counts = []
            for step in range(4):
                before = len(network.records)
                merger.after_step(step, 100.0 * (world.rank + 1))
                records = network.records[before:]
                if step % 2 == 0:
                    counts.append(len(records))
                    continue
                large = sorted((r.name, r.payload_bytes) for r in records if r.payload_bytes > 64)
                expected = sorted(("all_reduce", size * dtype.itemsize) for size in (1000, 200))
                case = f'mode "{mode}", masters of 1000 and 200 elements in {dtype}, step {step} of h 2'
                expect("operations with more than 64 bytes, and their bytes", large, expected, case=case)
            expect("operations in steps 0 and 2", counts, [0, 0], case=f'mode "{mode}", h 2')


def merged_by_one_process(ranks, rank):
    """A merge after two steps, in float64, rounded once."""
    lr, momentum = (1.0, 0.0) if ranks[0]["mode"] == "local" else (0.5, 0.5)
    total = sum(each["weight"] for each in ranks)
    start = exact(ranks[0]["parameters"])
    mean = sum(each["weight"] * (start - 4 * (2 * each["rank"] + 1)) for each in ranks) / total
    return (start - lr * (1 + momentum) * (start - mean)).to(ranks[0]["parameters"].dtype)


def call_merger(answer, group, parameters, weight, rank, mode):
    merger = answer.ReplicaMerger(config_of(mode, 2, 0.5, 0.5), {"a": parameters}, group, 4)
    for step in range(2):
        parameters -= 4 * (rank + step)
        merger.after_step(step, weight)
    return parameters


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS, differs=False, non_finite=False),
        "weight": Drawn(
            lambda rank, ranks, draw: float(rank > 0 or ranks == 1) if draw else rank + 1.0, {"rank 0 has weight 0": 1}
        ),
        "rank": Drawn(lambda rank, ranks, draw: rank),
        "mode": Drawn(lambda rank, ranks, draw: ("local", "diloco")[draw], {"DiLoCo": 1}),
    },
    call=call_merger,
    reference=merged_by_one_process,
    changes=("parameters",),
    replicas=True,
    roundings=12,  # a product and a sum for each of at most seven ranks, a quotient, and four for the outer step
    more_dtypes=(torch.float64,),  # of the weights
    # The parameters there and back; a few bytes for the weights, which may be summed or gathered.
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (ranks[0]["parameters"].nbytes + 16 + 8 * len(ranks)),
)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Any floating dtype, size, layout and group, also one of some ranks; mergers do not influence each other."""
    check_conditions(DECLARATION, answer, world, network)
