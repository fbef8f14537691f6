"""Initial values are addressed by (seed, name): neither order, layout, dtype nor device changes them."""

import math

import pytest
import torch
from torch import nn

from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters, initial_value
from minidist.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, init_std=0.02)
Q = "model.layers.1.self_attn.q_proj.weight"


def initialised(config: ModelConfig = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config).to(dtype)
    init_parameters(model, seed)
    return model


def test_every_parameter_is_its_own_initial_value():
    model = initialised(seed=4)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial_value(name, tuple(parameter.shape), 4, CONFIG)), name


def test_order_of_modules_does_not_matter():
    class Reversed(nn.Module):
        """The same names, registered last to first."""

        def __init__(self, source: Transformer):
            super().__init__()
            self.config = source.config
            for name, parameter in reversed(list(source.named_parameters())):
                *path, leaf = name.split(".")
                module = self
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module._modules[part]
                module.register_parameter(leaf, nn.Parameter(torch.empty_like(parameter)))

    expected = dict(initialised().named_parameters())
    other = Reversed(Transformer(CONFIG))
    init_parameters(other, 0)
    found = dict(other.named_parameters())
    assert list(found) != list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_with_wrappers_in_them_start_at_the_same_values():
    model = Transformer(CONFIG)
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    init_parameters(model, 0)
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, initialised().get_parameter(Q))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_initial_values_are_drawn_in_float32_and_cast(dtype):
    expected = initialised()
    for name, parameter in initialised(dtype=dtype).named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name).to(dtype)), name


def test_seed_and_name_change_the_values():
    shape = (32, 32)
    value = initial_value(Q, shape, 0, CONFIG)
    assert torch.equal(value, initial_value(Q, shape, 0, CONFIG))
    for other in (initial_value(Q, shape, 1, CONFIG), initial_value(Q.replace("1", "0"), shape, 0, CONFIG)):
        correlation = (value * other).mean() / CONFIG.init_std**2
        assert correlation.abs() < 5 / math.sqrt(value.numel())  # five standard errors of independent normals


@pytest.mark.parametrize(
    ("name", "std"),
    [
        (Q, 0.02),
        ("model.embed_tokens.weight", 0.02),
        ("lm_head.weight", 0.02),
        ("model.layers.0.self_attn.o_proj.weight", 0.02 / math.sqrt(2 * 2)),
        ("model.layers.0.mlp.down_proj.weight", 0.02 / math.sqrt(2 * 2)),
    ],
)
def test_matrices_are_normal_with_the_std_of_their_kind(name, std):
    value = initial_value(name, (300, 400), 0, CONFIG)
    # The standard error of a sample standard deviation is std / sqrt(2 n), that of a mean std / sqrt(n): five of each.
    assert abs(value.std().item() / std - 1) < 5 / math.sqrt(2 * value.numel())
    assert abs(value.mean().item() / std) < 5 / math.sqrt(value.numel())


def test_norms_start_at_one():
    names = [name for name, _ in initialised().named_parameters() if "norm" in name]
    assert len(names) == 2 * 2 + 1
    assert all((initialised().get_parameter(name) == 1).all() for name in names)


def test_a_tied_tensor_has_the_values_of_the_embedding():
    tied = initialised()
    untied = initialised(ModelConfig(**{**vars(CONFIG), "tie_embeddings": False}))
    assert torch.equal(tied.lm_head.weight, untied.model.embed_tokens.weight)
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_a_model_from_the_meta_device_starts_at_the_same_values():
    with torch.device("meta"):
        model = Transformer(CONFIG)
        with pytest.raises(ValueError, match="to_empty"):
            init_parameters(model, 0)
        model.to_empty(device="cpu")
        init_parameters(model, 0)
    assert all(torch.equal(p, initialised().get_parameter(name)) for name, p in model.named_parameters())


def test_global_random_state_is_neither_read_nor_written():
    model = Transformer(CONFIG)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    init_parameters(model, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_values_are_pinned_to_the_first_release():
    """Two versions can be compared only if they start equal. The tolerance is for other CPUs' logarithms."""
    value = initial_value(Q, (32, 32), 0, CONFIG).flatten()[:4]
    assert torch.allclose(
        value, torch.tensor([-0.001900304, 0.019842844, 0.026650283, -0.004604546]), atol=1e-7, rtol=0
    )
