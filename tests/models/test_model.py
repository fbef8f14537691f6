"""The transformer: loss, parameter count and FLOPs, compilation, and its imports."""

import ast
import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import minidist.models
from minidist.labels import IGNORE_INDEX
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress, dropout
from minidist.models.init import init_parameters
from minidist.models.layers import RMSNorm, apply_rotary, rotary_tables
from minidist.models.transformer import Transformer
from minidist.tools.estimate.flops import flops_per_token

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2)
UNTIED = ModelConfig(**{**vars(CONFIG), "tie_embeddings": False, "num_kv_heads": 1})


def initialised(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(config).to(dtype)
    init_parameters(model, 0)
    return model


def some_tokens(shape: tuple[int, int] = (3, 12), seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# Size and cost


@pytest.mark.parametrize("config", [ModelConfig(), CONFIG, UNTIED, ModelConfig(num_heads=8, num_kv_heads=8)])
def test_num_parameters_is_that_of_the_module(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert config.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_flops_per_token_are_those_of_the_matrix_products_run(config):
    model, tokens = initialised(config), some_tokens((2, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[0].backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    attention = 12 * config.num_layers * config.hidden_size * 16
    assert products == tokens.numel() * (flops_per_token(config, 16) - attention - 6 * norms)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, r"num_heads=3 does not divide hidden_size=128; possible: 1, 2, 4, 8, 16, 32, 64"),
        ({"num_heads": 128}, r"num_heads=128 gives heads of 1 features.*possible num_heads: 1, 2, 4, 8, 16, 32, 64"),
        ({"hidden_size": 7, "num_heads": 7}, "possible num_heads: none, hidden_size must be even"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4; possible: 1, 2, 4"),
        ({"dropout": 1.0}, r"dropout=1\.0: it must be at least 0 and less than 1"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
        ({"num_layers": 0}, r"num_layers=0: it must be at least 1"),
        ({"norm_eps": 0.0}, r"norm_eps=0\.0: it must be greater than 0"),
    ],
)
def test_an_impossible_config_is_refused_with_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        Transformer(ModelConfig(**change))


def test_a_sequence_beyond_the_maximum_is_refused():
    model = initialised(ModelConfig(**{**vars(CONFIG), "max_seq_len": 8}))
    with pytest.raises(ValueError, match="12 tokens for a model with max_seq_len=8"):
        model(some_tokens())


# The loss contract


def test_loss_is_the_sum_over_the_labels_that_count():
    model, tokens, labels = initialised(), some_tokens(), some_tokens(seed=1)
    labels[0, :7] = labels[2, 3] = IGNORE_INDEX
    loss, count = model(tokens, labels)
    log_probabilities = model(tokens).log_softmax(-1)
    expected = -sum(
        log_probabilities[b, s, labels[b, s]] for b in range(3) for s in range(12) if labels[b, s] != IGNORE_INDEX
    )
    assert count == 3 * 12 - 8
    assert count.dtype == torch.int64
    assert abs(loss - expected) < 1e-13 * expected  # 28 additions in float64


def test_a_batch_of_ignored_labels_gives_zero_loss_and_gradients():
    model, tokens = initialised(), some_tokens()
    loss, count = model(tokens, torch.full_like(tokens, IGNORE_INDEX))
    loss.backward()
    assert loss == 0 and count == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_a_batch_of_no_samples_gives_zero_and_zero_gradients():
    model, tokens = initialised(), some_tokens((0, 12))
    loss, count = model(tokens, tokens)
    loss.backward()
    assert loss == 0 and count == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_summed_in_at_least_float32(dtype, expected):
    tokens = some_tokens()
    loss, _ = initialised(dtype=dtype)(tokens, tokens)
    assert loss.dtype == expected
    assert initialised(dtype=dtype)(tokens).dtype == dtype


def test_losses_of_shards_add_up_to_that_of_the_batch():
    model, tokens, labels = initialised(), some_tokens(), some_tokens(seed=1)
    parts = sum(model(tokens[i : i + 1], labels[i : i + 1])[0] for i in range(3))
    whole = model(tokens, labels)[0]
    assert abs(whole - parts) < 1e-13 * whole  # 36 additions in float64


# Positions and attention


def test_a_later_token_does_not_change_an_earlier_logit():
    model, tokens = initialised(), some_tokens()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_only_differences_of_positions_matter():
    model, tokens = initialised(), some_tokens()
    expected = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(12)), expected)
    # Angles of order 1000 are rounded to 1e-13 in float64, and the logits are of order 1.
    assert (model(tokens, positions=torch.arange(12) + 1000) - expected).abs().max() < 1e-11
    assert (model(tokens, positions=torch.arange(12) * 2) - expected).abs().max() > 1e-6


def test_a_query_head_uses_the_key_head_of_its_group():
    config = ModelConfig(**{**vars(CONFIG), "num_heads": 4, "num_kv_heads": 2})
    attention = initialised(config).model.layers[0].self_attn
    query, key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    found = attention.attend(query, key, value)
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].transpose(-1, -2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        assert torch.allclose(found[:, head], scores.softmax(-1) @ value[:, head // 2], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_norm_and_rotation_are_computed_in_at_least_float32(dtype, computed):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).to(dtype)
    norm = RMSNorm(8, 1e-5).to(dtype)
    wide = x.to(computed)
    expected = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    # One rounding to dtype on either side: at most one unit in the last place apart, and a few of the computed dtype.
    ulp = torch.finfo(dtype).eps + 4 * torch.finfo(computed).eps
    assert ((norm(x) - expected).abs() <= ulp * expected.abs()).all()
    assert norm(x).dtype == dtype

    tables = rotary_tables(torch.arange(5), 8, 10000.0, dtype)
    assert tables[0].dtype == tables[1].dtype == computed
    complex_x = torch.complex(*(half.double() for half in x.chunk(2, -1)))
    angle = torch.arange(5)[:, None, None] * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = complex_x * torch.polar(torch.ones_like(angle), angle)
    difference = apply_rotary(x, tables).double() - torch.cat((turned.real, turned.imag), -1)
    # Rounded once to dtype; angles of at most 4 radians and three roundings in the computed dtype.
    assert difference.abs().max() < x.abs().max() * (torch.finfo(dtype).eps + 16 * torch.finfo(computed).eps)


# Compilation and independence


def test_a_block_compiles_into_one_graph_with_dropout():
    model = initialised(ModelConfig(**{**vars(CONFIG), "dropout": 0.2})).train()
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    rotary = model.model.rotary_tables(torch.arange(12), torch.float64)
    hidden = torch.randn(3, 12, 32, dtype=torch.float64)
    block = torch.compile(model.model.layers[1], fullgraph=True, backend=count)
    for step in range(4):
        keys = model.model.dropout_keys(1, DropoutAddress(0, step, torch.arange(3), torch.arange(12)))
        assert torch.equal(block(hidden, rotary, keys), model.model.layers[1](hidden, rotary, keys))
    assert len(graphs) == 1
    assert not torch.equal(dropout(hidden, 0.2, keys[0]), hidden)


def test_the_model_compiles_into_one_graph():
    model, tokens = initialised(), some_tokens()
    torch._dynamo.reset()
    loss, count = torch.compile(model, fullgraph=True, backend="eager")(tokens, tokens)
    assert torch.equal(loss, model(tokens, tokens)[0]) and count == 36


def test_models_import_only_torch_the_standard_library_and_constants_and_hashes():
    files = sorted(Path(minidist.models.__file__).parent.glob("*.py"))
    assert len(files) >= 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("minidist.models") or name in ("minidist.hashing", "minidist.labels")
                allowed = own or name.split(".")[0] in {"torch", *sys.stdlib_module_names}
                assert allowed and "distributed" not in name, f"{file.name} imports {name}"


def test_a_step_against_the_gradient_lowers_the_loss_as_predicted():
    """First-order check of the whole backward: f(x + e d) - f(x - e d) = 2 e grad.d, up to e^2."""
    model, tokens, labels = initialised(), some_tokens(), some_tokens(seed=1)
    model(tokens, labels)[0].backward()
    torch.manual_seed(0)
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions, strict=True))
    losses, epsilon = [], 1e-6
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, direction in zip(moved.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=sign * epsilon)
        losses.append(moved(tokens, labels)[0].item())
    # Rounding: a loss of 150 known to 1e-14 over 2e-6 gives 1e-6; the third derivative times e^2 is far less.
    assert (losses[0] - losses[1]) / (2 * epsilon) == pytest.approx(slope.item(), rel=1e-5)
    assert F.softplus(slope.abs()) > 1


@pytest.mark.parametrize("missing", ["embedding", "head"])
def test_a_pipeline_stage_with_one_end_of_a_tied_model_can_be_moved(missing):
    """Its other end is `nn.Identity`, which must neither be asked for a weight nor be given one."""
    model = Transformer(CONFIG)
    if missing == "embedding":
        model.model.embed_tokens = nn.Identity()
    else:
        model.lm_head = nn.Identity()
    names = list(model.state_dict())
    model.double()
    assert list(model.state_dict()) == names
