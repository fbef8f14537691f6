"""A tied output head stays the embedding's tensor through copies and loading, and is named once."""

import copy
import pickle

import pytest
import torch

from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2)
UNTIED = ModelConfig(**{**vars(CONFIG), "tie_embeddings": False})


def initialised(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config).double()
    init_parameters(model, 0)
    return model


def test_tied_head_is_the_embedding_and_is_named_once():
    model = initialised()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= model.state_dict().keys()
    assert "lm_head.weight" in dict(initialised(UNTIED).named_parameters())


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: model.to("meta").to_empty(device="cpu"),
        lambda model: model.to(torch.bfloat16),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) and model,
        lambda model: model.load_state_dict(initialised().state_dict(), assign=True) and model,
    ],
    ids=["deepcopy", "to_empty", "to", "pickle", "assign", "assign another's"],
)
def test_tied_weights_survive_copies_and_loading(change):
    model = change(initialised())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.load_state_dict(initialised().state_dict())  # the hooks survive too
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_state_dict_may_name_a_tied_tensor_once(name):
    state = initialised().state_dict()
    state = {key: value + 1 for key, value in state.items() if key != name}
    model = initialised()
    model.load_state_dict(state)
    assert torch.equal(model.lm_head.weight, initialised().lm_head.weight + 1)


def test_a_state_dict_with_another_head_is_refused_by_a_tied_model():
    with pytest.raises(ValueError, match="differ.*tie_embeddings=False"):
        initialised().load_state_dict(initialised(UNTIED).state_dict())


def test_gradient_of_a_tied_tensor_is_the_sum_of_both_uses():
    tied, untied = initialised(), initialised(UNTIED)
    untied.load_state_dict(tied.state_dict())
    tokens = torch.arange(36).view(3, 12) * 7 % 64
    for model in (tied, untied):
        model(tokens, tokens.roll(-1, 1))[0].backward()
    expected = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    # 36 tokens are added in another order: some tens of roundings of 2e-16.
    assert (tied.lm_head.weight.grad - expected).abs().max() < 1e-13 * expected.abs().max()
