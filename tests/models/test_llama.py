"""With the same weights the model computes what Hugging Face's Llama computes."""

import pytest
import torch
import torch.nn.functional as F

from minidist.labels import IGNORE_INDEX
from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.tools.hugging_face import to_llama_config

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

LAYOUTS = [(tied, kv_heads) for tied in (True, False) for kv_heads in (1, 2, 4)]


def pair(tied: bool, kv_heads: int, dtype: torch.dtype) -> tuple[Transformer, torch.nn.Module]:
    """Our model and theirs, theirs loaded from ours by plain load_state_dict."""
    config = ModelConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_kv_heads=kv_heads,
        rope_theta=5000.0,
        tie_embeddings=tied,
        init_std=0.2,  # large enough that attention is far from uniform and a wrong rotation shows
    )
    ours = Transformer(config).to(dtype)
    init_parameters(ours, seed=3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_llama_config(config))).to(dtype).eval()
    if dtype == torch.float64:
        compute_in_float64(theirs, config)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def compute_in_float64(theirs: torch.nn.Module, config: ModelConfig) -> None:
    """Compute angles and norms in float64: Hugging Face's float32 there would hide differences below 1e-6."""
    theirs.model.rotary_emb = Rotary64(config.head_dim, config.rope_theta)

    def norm() -> torch.nn.Module:
        return torch.nn.RMSNorm(config.hidden_size, config.norm_eps, dtype=torch.float64)

    theirs.model.norm = norm()
    for layer in theirs.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()


class Rotary64(torch.nn.Module):
    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.frequencies
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


def some_tokens(vocab: int, shape=(2, 40)) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


# float32: the bound of issue 2. float64: eps 2e-16 times some thousand roundings along the depth.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("tied", "kv_heads"), LAYOUTS)
def test_logits_equal_those_of_llama(tied, kv_heads, dtype, bound):
    ours, theirs = pair(tied, kv_heads, dtype)
    tokens = some_tokens(97)
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max() / expected.abs().max()
    assert expected.std() > 0.5
    assert difference < bound


@pytest.mark.parametrize(("tied", "kv_heads"), LAYOUTS)
def test_gradients_equal_those_of_llama(tied, kv_heads):
    ours, theirs = pair(tied, kv_heads, torch.float64)
    tokens, labels = some_tokens(97), some_tokens(97).roll(-1, 1)
    labels[0, 5:9] = IGNORE_INDEX
    loss, count = ours(tokens, labels)
    loss.backward()
    expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    assert count == labels.numel() - 4
    assert abs(loss - expected) < 1e-12 * abs(expected)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        # 80 tokens are summed into each element, in another order: some hundred roundings of 2e-16.
        difference = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert difference < 1e-11, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_of_llama_loads_as_it_is(tied):
    ours, theirs = pair(tied, 2, torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.5)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert (ours(some_tokens(97)) - theirs(some_tokens(97)).logits).abs().max() < 1e-4  # logits grew to about 30
