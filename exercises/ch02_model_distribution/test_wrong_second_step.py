"""Tests of wrong_second_step: the reference has unsharded layers, on one process, in float64."""

from typing import NamedTuple

import torch

from exercises.testing import Wrong, expect, expect_faulty_line, expect_invariant, show, test

TOKENS, HIDDEN, INNER, LAYERS, EPOCHS = 12, 6, 12, 2, 3
TOLERANCE = 1e-9  # float64 sums in another order, through three steps of Adam
KEYS = ("tokens", "features", "terms", "pair", "gradient", "loss")
SHAPES = {"norm": (HIDDEN,), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "shift": (HIDDEN,)}


class Run(NamedTuple):
    """The results of one call of main on this rank: the tensors of each layer by name, and the recorded messages."""

    layers: list
    losses: list
    records: list


RUNS = []  # several tests use one run


def layers_of():
    """Return layers that are equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    draw = {name: 0.3 * torch.randn(LAYERS, *shape, generator=generator).double() for name, shape in SHAPES.items()}
    return [{name: each[layer] + (name == "norm") for name, each in draw.items()} for layer in range(LAYERS)]


def data():
    inputs = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.flip(1).sin()


def trained(answer, run):
    """Run main on this rank, or return the stored run."""
    if not RUNS:
        result = run(answer.main, *data(), layers_of(), epochs=EPOCHS)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], list):
            raise Wrong("type", "main must return the layers and the losses", "(layers, losses)", show(result))
        layers = [{name: tensor.tolist() for name, tensor in layer.items()} for layer in result[0]]
        RUNS.append(Run(layers, result[1], run.records))
    return RUNS[0]


def one_process():
    """(layers, losses) of a single process."""
    inputs, targets = data()
    layers = [{name: tensor.clone().requires_grad_() for name, tensor in layer.items()} for layer in layers_of()]
    optimizer = torch.optim.Adam([tensor for layer in layers for tensor in layer.values()], lr=0.01, eps=0.001)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        x = inputs
        for layer in layers:
            size = (x.square().mean(1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
            x = x + torch.tanh(x / size * layer["norm"] @ layer["up"].T) @ layer["down"].T + layer["shift"]
        loss = ((x - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [{name: tensor.detach() for name, tensor in layer.items()} for layer in layers], losses


@test(points=3, ranks=(2, 3))
def replicas_stay_equal(answer, world, run):
    """After training, replicated parameters are equal on all ranks."""
    everywhere = run.gather([[layer["norm"], layer["shift"]] for layer in trained(answer, run).layers])
    for rank, layers in enumerate(everywhere):
        expect(f"norms and shifts of rank {rank} and of rank 0", layers, everywhere[0], case="main(...)")


@test(points=4, ranks=(1, 2, 3))
def equals_one_process(answer, world, run):
    """Each rank holds its shard of the model that a single process trains, and the losses sum to its loss."""
    got, (layers, losses) = trained(answer, run), one_process()
    for number, layer in enumerate(layers):
        parts = {
            "up": layer["up"].chunk(world.size)[world.rank],
            "down": layer["down"].chunk(world.size, 1)[world.rank],
        }
        for name, expected in (layer | parts).items():
            expect(
                f"{name} of layer {number}", got.layers[number][name], expected, tolerance=TOLERANCE, case="main(...)"
            )
    total = [sum(each) for each in zip(*run.gather(got.losses), strict=True)]
    expect("the sum of all ranks' losses", total, losses, tolerance=TOLERANCE, case="main(...)")


@test(points=3, ranks=(2,))
def nothing_more_is_sent(answer, world, run):
    """The token collectives do not change, and at most norms and shifts are all-reduced, once per step."""
    records = trained(answer, run).records
    pairs = [record.name for record in records if record.name in ("all_gather", "reduce_scatter")]
    expect("all-gathers in a step", pairs.count("all_gather") / EPOCHS, 2 * LAYERS, case="main(...)")
    expect("reduce-scatters in a step", pairs.count("reduce_scatter") / EPOCHS, 2 * LAYERS, case="main(...)")
    others = [record for record in records if record.name not in ("all_gather", "reduce_scatter")]
    expect("the other operations", sorted({record.name for record in others}), ["all_reduce"], case="main(...)")
    payload = sum(record.payload_bytes for record in others) / EPOCHS / 8
    most = 2 * LAYERS * HIDDEN
    if payload > most:
        raise Wrong("wrong", "elements all-reduced in a step", f"at most {most}", show(payload), case="main(...)")


@test(points=2)
def names_the_invariant(answer):
    """INVARIANT is the rule that the original program violates."""
    expect_invariant(answer.INVARIANT, "terms", KEYS)


@test(points=2)
def names_the_line(answer, faulty_lines):
    """LINE is the line of the unchanged stub that violates the rule."""
    expect_faulty_line(answer.LINE, faulty_lines)
