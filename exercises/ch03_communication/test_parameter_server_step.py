"""Tests of parameter_server_step: whole numbers, so that sums are exact in any order."""

from dataclasses import replace

import torch

from exercises.conditions import FLOATS, Choices, Declaration, Drawn, Tensors, check_conditions, exact, reduced
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.traffic import TransferRecorder
from minidist.comm import all_gather_object


def gradient(rank, n=6):
    """Return a rank's gradient: different on every rank."""
    return torch.arange(float(n)) + 10.0 * rank + 1


class Update:
    """theta <- theta - 2 * gradient; records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, parameters, gradient):
        self.calls.append((parameters.tolist(), gradient.tolist()))
        parameters.sub_(2 * gradient)


def run(answer, world, network, root, op="sum", n=6):
    """One step: (parameters, gradient, update, recorder) of this rank. Ranks start with different parameters."""
    parameters, mine, update = torch.full((n,), 1000.0 + world.rank), gradient(world.rank, n), Update()
    with TransferRecorder(network) as recorder:
        answer.parameter_server_step(parameters, mine, update, network.group, root, op)
    return parameters, mine, update, recorder


def total(world, n=6):
    return sum(gradient(rank, n) for rank in range(world.size))


@test(points=4, ranks=(1, 2, 3))
def all_ranks_get_the_new_parameters(answer, world, network):
    """Every rank ends with the root's parameters, updated with the sum of all gradients."""
    for root in range(world.size):
        parameters, *_ = run(answer, world, network, root)
        expect(f"the parameters, root {root}", parameters, 1000.0 + root - 2 * total(world))


@test(points=2, ranks=(3,))
def only_the_root_updates(answer, world, network):
    """`update` is called once, on the root only, with the root's parameters and the summed gradient."""
    _, _, update, _ = run(answer, world, network, 1)
    every = all_gather_object(update.calls, network.group)
    expect("calls of update, by rank", [len(calls) for calls in every], [0, 1, 0])
    expect("what update was called with", list(every[1][0]), [[1001.0] * 6, total(world).tolist()])


@test(points=2, ranks=(2, 3))
def reduces_with_op(answer, world, network):
    """Gradients are reduced by `op`; the mean is the sum divided by the number of ranks."""
    parameters, *_ = run(answer, world, network, 0, "mean")
    expected = 1000 - 2 * total(world) / world.size
    expect("the parameters after an update with the mean", parameters, expected, tolerance=1e-3)
    parameters, *_ = run(answer, world, network, 0, "max")
    expect("the parameters after an update with the maximum", parameters, 1000 - 2 * gradient(world.size - 1))


@test(points=2, ranks=(3, 5))
def gradients_in_parameters_out(answer, world, network):
    """Every other rank sends its gradient once and receives the parameters once; its gradient does not change."""
    _, mine, _, recorder = run(answer, world, network, 2)
    if world.rank != 2:
        expect("this rank's gradient afterwards", mine, gradient(world.rank))
    if world.rank != 2 and world.size == 3:  # a tree of five ranks passes tensors on
        received = sum(elements for kind, _, elements in recorder.transfers if kind == "recv")
        expect("elements (sent, received)", [recorder.elements_sent(), received], [6, 6])


def step(answer, group, parameters, gradient, root, op):
    answer.parameter_server_step(parameters, gradient, lambda theta, grad: theta.sub_(grad), group, root, op)
    return parameters


def stepped(ranks, rank):
    """The root's parameters less the reduced gradient."""
    first = ranks[0]
    parameters = exact(ranks[first["root"]]["parameters"])
    gradient = reduced([each["gradient"] for each in ranks], first["op"])
    return (parameters - exact(gradient)).to(first["parameters"].dtype)


DECLARATION = Declaration(
    inputs={
        "parameters": Tensors(dtypes=FLOATS, layouts=("slice", "scalar")),
        "gradient": Tensors(layouts=("slice",), like="parameters"),
        "root": Drawn(lambda rank, ranks, draw: draw % ranks, {"the last rank": 6, "rank 1": 1}),
        "op": Choices(("sum", "max", "min")),
    },
    call=step,
    reference=stepped,
    changes=("parameters", "gradient"),
    replicas=True,
    max_bytes=lambda ranks: 2 * (len(ranks) - 1) * ranks[0]["parameters"].nbytes,
)
ROUNDED = replace(
    DECLARATION,
    inputs=DECLARATION.inputs
    | {
        "parameters": Tensors(dtypes=FLOATS, layouts=(), sizes=False, non_finite=False),
        "gradient": Tensors(layouts=(), non_finite=False, like="parameters"),
        "op": Choices(("mean",)),
    },
    roundings=2,
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every floating dtype, size, layout, root, reduction and group, also one of only some ranks."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(ROUNDED, answer, world, network)
