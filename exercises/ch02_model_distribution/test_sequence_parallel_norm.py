"""Tests of sequence_parallel_norm: the reference is the unsharded model on one process, in float64."""

from dataclasses import replace

import torch

from exercises.testing import expect, test
from minidist.comm import all_gather_object
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parameters import named_parameters

LENGTH, BATCH = 12, 2
TOLERANCE = 1e-12  # sums of a few hundred terms of about 1e-2, in float64 in another order
CONFIG = ModelConfig(24, 24, 24, 2, 12, 12, 16, tie_embeddings=False)


def model_of(config):
    """Return the unsharded model, equal on all ranks; its norms are not all ones, so that a missing norm shows."""
    model = Transformer(config).double()
    init_parameters(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


def batch():
    """Return tokens and labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(24, (BATCH, LENGTH), generator=generator) for _ in range(2)]


def run(answer, network, sequence, config=CONFIG):
    """Shard the model with the learner's function and run it once: (loss, held, parameters)."""
    model = model_of(config)
    held = answer.apply_tensor_parallel(model, network.group, sequence)
    total, _ = model(*batch())
    total.backward()
    return total.item(), held, named_parameters(model)


def one_process(config=CONFIG):
    """Return the loss and the gradients by name of the unsharded model."""
    model = model_of(config)
    total, _ = model(*batch())
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in named_parameters(model).items()}


def reduced(name, held, grad, network):
    """Return this rank's gradient, summed over the ranks that hold the same shard if the table says partial."""
    everywhere = all_gather_object(grad.tolist(), network.group)  # known to all ranks, whatever `partial` says
    grads = [torch.tensor(everywhere[rank], dtype=torch.float64) for rank in held.holders]
    return sum(grads) if held.partial else grad


def gradients_are_right(answer, world, network, sequence, config, names):
    """Compare the gradients of the selected parameters, reduced as the table says."""
    _, held, parameters = run(answer, network, sequence, config)
    _, grads = one_process(config)
    for name in filter(names, grads):
        got = reduced(name, held[name], parameters[name].grad, network)
        expected = grads[name][held[name].box.slices]
        reduction = "summed over its holders (partial)" if held[name].partial else "not summed (not partial)"
        expect(f"the gradient of {name}, {reduction}", got, expected, tolerance=TOLERANCE)


@test(points=3, ranks=(2, 4))
def loss_is_that_of_one_process(answer, world, network):
    """Every rank has the loss of the unsharded model, with and without sequence parallelism."""
    expected, _ = one_process()
    for sequence in (True, False):
        got, _, _ = run(answer, network, sequence)
        expect(f"the loss with sequence={sequence}", got, expected, tolerance=1e-11)  # of about 80, to 13 digits


@test(points=3, ranks=(2, 3))
def equal_bytes_and_fewer_tokens_per_norm(answer, world, network):
    """With `sequence` each all-reduce becomes an all-gather and a reduce-scatter; a norm sees LENGTH / ranks tokens."""
    seen, sent = {}, {}
    for sequence in (True, False):
        model, before = model_of(CONFIG), len(network.records)
        answer.apply_tensor_parallel(model, network.group, sequence)
        lengths = []
        model.model.norm.register_forward_hook(lambda _, args, out, lengths=lengths: lengths.append(out.shape[1]))
        model(*batch())[0].backward()
        seen[sequence] = lengths
        sent[sequence] = sum(record.wire_bytes for record in network.records[before:] if len(record.shape) == 3)
    expect("tokens in the last norm, with sequence=True", seen[True], [LENGTH // world.size])
    expect("tokens in the last norm, with sequence=False", seen[False], [LENGTH])
    expect("bytes of activations sent, with sequence=True", sent[True], sent[False])


@test(points=4, ranks=(2, 3))
def norms_are_partial(answer, world, network):
    """With sequence parallelism the table marks the gradient of every norm as partial."""
    gradients_are_right(answer, world, network, True, CONFIG, lambda name: "norm" in name)


@test(points=4, ranks=(3,))
def other_gradients_do_not_change(answer, world, network):
    """Other gradients do not change: replicated heads stay partial, and without `sequence` no norm is partial."""
    config = replace(CONFIG, num_kv_heads=1)
    gradients_are_right(answer, world, network, True, config, lambda name: "norm" not in name)
    gradients_are_right(answer, world, network, False, config, lambda name: True)
