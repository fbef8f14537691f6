"""Recomputation gives bit-equal gradients, saves only the tensors it declares, and frees them during backward."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.parallel.pipeline.split_backward import DeferWeightGradients, compute_weight_gradient
from minidist.parameters import named_parameters
from minidist.recompute import apply_recomputation, with_recomputation

SEQ_LEN, SAMPLES = 24, 3
KINDS = ["none", "block", "selective"]


def make_model(dropout: float = 0.1, dtype: torch.dtype = torch.float64) -> Transformer:
    config = ModelConfig(56, 32, 44, 3, num_heads=4, num_kv_heads=2, dropout=dropout)
    model = Transformer(config)
    init_parameters(model, seed=1)
    return model.to(dtype)


def loss_of(model: Transformer, step: int = 0) -> torch.Tensor:
    tokens = torch.randint(56, (SAMPLES, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    address = DropoutAddress(1, step, torch.arange(SAMPLES), torch.arange(SEQ_LEN))
    return model(tokens, tokens.roll(-1, 1), address=address)[0]


def train_two_micro_batches(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients of two micro-batches; the second runs backward before the first, as in some pipelines."""
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
def test_gradients_are_bit_equal_without_recomputation_and_with_torchs(kind, dtype):
    plain, ours, torchs = (make_model(dtype=dtype) for _ in range(3))
    names = list(named_parameters(ours))
    apply_recomputation(ours, kind)
    assert list(named_parameters(ours)) == names
    for layer in torchs.model.layers:
        layer.forward = lambda *args, run=layer.forward: checkpoint(run, *args, use_reentrant=False)
    expected = train_two_micro_batches(plain)
    assert all(grad.abs().sum() > 0 for grad in expected[1].values())
    assert equal(train_two_micro_batches(ours), expected) and equal(train_two_micro_batches(torchs), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_and_unused_parameters_get_no_gradient(kind):
    found = []
    for how in ("none", kind):
        model = make_model()
        model.model.layers[1].unused = nn.Parameter(torch.ones(3))
        model.model.embed_tokens.weight.requires_grad_(False)  # the first layer's input takes no gradient
        for name in ("input_layernorm", "mlp"):
            getattr(model.model.layers[0], name).requires_grad_(False)
        model.model.layers[2].requires_grad_(False)  # a whole layer, through which gradients pass
        apply_recomputation(model, how)
        found.append(train_two_micro_batches(model))
    assert equal(*found)
    assert sum(grad is not None for grad in found[0][1].values()) == 1 + 9 + 5  # last norm, layer 1, part of layer 0


def count_layer_runs(model: Transformer) -> list[int]:
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
    model = make_model()
    runs = count_layer_runs(model)
    apply_recomputation(model, "block")
    loss = loss_of(model)
    assert runs == [1, 1, 1]
    loss.backward()
    assert runs == [2, 2, 2]
    with torch.no_grad():
        assert not loss_of(model).requires_grad
    assert runs == [3, 3, 3]


def test_recomputation_stops_at_the_last_tensor_that_backward_needs():
    for dropout, seen in ((0.0, 1), (0.1, 2)):  # the mask of the last dropout comes after the last projection
        model, runs = make_model(dropout), []
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        apply_recomputation(model, "block")
        loss_of(model).backward()
        assert len(runs) == seen


def test_backward_can_run_twice_with_retain_graph():
    model, twice = make_model(), make_model()
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
def test_recomputed_layers_can_defer_weight_gradients(kind):
    plain, model = make_model(), make_model()
    apply_recomputation(model, kind)
    expected = train_two_micro_batches(plain)[1]
    names, deferred = {p: name for name, p in named_parameters(model).items()}, []
    for step in (1, 0):
        with DeferWeightGradients(names, deferred):
            loss = loss_of(model, step)
        loss.backward()  # where the context is over
    later = {name for name, *_ in deferred}
    assert {name for name in names.values() if name.endswith("proj.weight")} <= later
    for name, parameter in named_parameters(model).items():
        assert (parameter.grad is None) == (name in later - {"model.embed_tokens.weight"})
        found = sum(
            (compute_weight_gradient(half) for half in deferred if half[0] == name), torch.zeros_like(parameter)
        )
        found += 0 if parameter.grad is None else parameter.grad
        # Other kernels for the same sums of 72 products in float64.
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)


def test_recomputed_tensors_are_freed_during_backward():
    made, expired = [], []

    def run(x):
        first = x.exp()  # of which the result is saved, as of the second
        second = first.exp()
        made.append([StorageWeakRef(each.untyped_storage()) for each in (first, second)])
        if len(made) == 1:
            first.register_hook(lambda _: expired.append([reference.expired() for reference in made[-1]]))
        return second

    with_recomputation(with_last_saved_tensor(run))(torch.ones(5, requires_grad=True)).sum().backward()
    assert len(made) == 2 and expired == [[False, True]]


def with_last_saved_tensor(run):
    """Append an operation that saves a tensor, so that recomputation runs to the end of `run`."""
    return lambda x: run(x) * torch.ones(5)


def test_recomputation_that_differs_from_the_forward_raises():
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
