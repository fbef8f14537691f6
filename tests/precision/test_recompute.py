"""Recomputation gives the gradients of no recomputation, bit for bit, and keeps what it says."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from minidist.models import DropoutAddress, ModelConfig, Transformer, init_parameters
from minidist.parallel.pipeline.split_backward import DeferWeightGradients, weight_gradient
from minidist.parameters import named_parameters
from minidist.recompute import apply_recomputation, with_recomputation

SEQ_LEN, SAMPLES = 24, 3
KINDS = ["none", "block", "selective"]


def transformer(dropout: float = 0.1, dtype: torch.dtype = torch.float64) -> Transformer:
    config = ModelConfig(56, 32, 44, 3, num_heads=4, num_kv_heads=2, dropout=dropout)
    model = Transformer(config)
    init_parameters(model, seed=1)
    return model.to(dtype)


def loss_of(model: Transformer, step: int = 0) -> torch.Tensor:
    tokens = torch.randint(56, (SAMPLES, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    address = DropoutAddress(1, step, torch.arange(SAMPLES), torch.arange(SEQ_LEN))
    return model(tokens, tokens.roll(-1, 1), address=address)[0]


def trained(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients of two micro-batches, the second backward before the first as a pipeline may have it."""
    losses = [loss_of(model, step) for step in (0, 1)]
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).detach(), {name: p.grad for name, p in named_parameters(model).items()}


def equal(one, other) -> bool:
    (loss, grads), (loss_, grads_) = one, other
    assert grads.keys() == grads_.keys()
    same = [
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(grads.values(), grads_.values(), strict=True)
    ]
    return torch.equal(loss, loss_) and all(same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bit_equal_to_those_without_and_to_torchs_own(kind, dtype):
    plain, ours, torchs = (transformer(dtype=dtype) for _ in range(3))
    names = list(named_parameters(ours))
    apply_recomputation(ours, kind)
    assert list(named_parameters(ours)) == names
    for layer in torchs.model.layers:
        layer.forward = lambda *args, run=layer.forward: checkpoint(run, *args, use_reentrant=False)
    wanted = trained(plain)
    assert all(grad.abs().sum() > 0 for grad in wanted[1].values())
    assert equal(trained(ours), wanted) and equal(trained(torchs), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_and_what_is_unused_stay_so(kind):
    found = []
    for how in ("none", kind):
        model = transformer()
        model.model.layers[1].unused = nn.Parameter(torch.ones(3))
        model.model.embed_tokens.weight.requires_grad_(False)  # the first layer's input takes no gradient
        for name in ("input_layernorm", "mlp"):
            getattr(model.model.layers[0], name).requires_grad_(False)
        model.model.layers[2].requires_grad_(False)  # a whole layer, through which gradients pass
        apply_recomputation(model, how)
        found.append(trained(model))
    assert equal(*found)
    assert sum(grad is not None for grad in found[0][1].values()) == 1 + 9 + 5  # last norm, layer 1, part of layer 0


def counting(model: Transformer) -> list[int]:
    """Counts how often each layer's norm runs."""
    runs = [0] * len(model.model.layers)

    def count(index):
        def hook(*_):
            runs[index] += 1

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(count(index))
    return runs


def test_each_layer_runs_twice_and_without_gradients_once():
    model = transformer()
    runs = counting(model)
    apply_recomputation(model, "block")
    loss = loss_of(model)
    assert runs == [1, 1, 1]
    loss.backward()
    assert runs == [2, 2, 2]
    with torch.no_grad():
        assert not loss_of(model).requires_grad
    assert runs == [3, 3, 3]


def test_the_second_run_ends_with_the_last_tensor_that_backward_asks_for():
    for dropout, seen in ((0.0, 1), (0.1, 2)):  # the mask of the last dropout comes after the last projection
        model, runs = transformer(dropout), []
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        apply_recomputation(model, "block")
        loss_of(model).backward()
        assert len(runs) == seen


def test_a_graph_can_be_gone_through_twice():
    model, twice = transformer(), transformer()
    loss_of(model).backward()
    apply_recomputation(twice, "block")
    loss = loss_of(twice)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in named_parameters(twice).items()}
    loss.backward()
    for name, parameter in named_parameters(model).items():
        assert torch.equal(once[name], parameter.grad)
        assert torch.equal(named_parameters(twice)[name].grad, 2 * parameter.grad), name  # x + x is exact


@pytest.mark.parametrize("kind", KINDS)
def test_weights_can_be_left_for_later(kind):
    plain, model = transformer(), transformer()
    apply_recomputation(model, kind)
    wanted = trained(plain)[1]
    names, halves = {p: name for name, p in named_parameters(model).items()}, []
    for step in (1, 0):
        with DeferWeightGradients(names, halves):
            loss = loss_of(model, step)
        loss.backward()  # where the context is over
    later = {name for name, *_ in halves}
    assert {name for name in names.values() if name.endswith("proj.weight")} <= later
    for name, parameter in named_parameters(model).items():
        assert (parameter.grad is None) == (name in later - {"model.embed_tokens.weight"})
        found = sum((weight_gradient(half) for half in halves if half[0] == name), torch.zeros_like(parameter))
        found += 0 if parameter.grad is None else parameter.grad
        # Other kernels for the same sums of 72 products in float64.
        torch.testing.assert_close(found, wanted[name], rtol=1e-12, atol=1e-12)


def test_what_was_found_is_let_go_as_backward_goes_on():
    made, expired = [], []

    def run(x):
        first = x.exp()  # of which the result is saved, as of the second
        second = first.exp()
        made.append([StorageWeakRef(each.untyped_storage()) for each in (first, second)])
        if len(made) == 1:
            first.register_hook(lambda _: expired.append([reference.expired() for reference in made[-1]]))
        return second

    with_recomputation(run_to_the_end(run))(torch.ones(5, requires_grad=True)).sum().backward()
    assert len(made) == 2 and expired == [[False, True]]


def run_to_the_end(run):
    """With something that is saved after all the rest, so that the second run comes as far."""
    return lambda x: run(x) * torch.ones(5)


def test_a_second_run_that_differs_is_an_error():
    sizes = iter((3, 4))
    run = with_recomputation(lambda x: (x[: next(sizes)].exp() * 2).exp().sum())
    out = run(torch.ones(5, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"saved tensor 0 was .*\[3\].* now it is .*\[4\]"):
        out.backward()
    calls = []
    fewer = with_recomputation(lambda x: x.exp().sum() if calls else calls.append(1) or x.exp().exp().sum())
    out = fewer(torch.ones(5, requires_grad=True))
    with pytest.raises(RuntimeError, match="saved tensor 1 was .* now it is missing"):
        out.backward()


def test_arguments_may_be_tuples_of_any_kind():
    def run(x, pair):
        low, (high, none) = pair
        assert none is None
        return (x * low).exp() * high

    x, low, high = (torch.full((2,), value, requires_grad=True) for value in (0.5, 2.0, 3.0))
    out = with_recomputation(run)(x, (low, (high, None)))
    grads = torch.autograd.grad(out.sum(), (x, low, high))
    plain = torch.autograd.grad(run(x, (low, (high, None))).sum(), (x, low, high))
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
