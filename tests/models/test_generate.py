"""Sampling text: temperature, top-k, context and generator determine the next token."""

import pytest
import torch

from minidist.models.config import ModelConfig
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.tools.console.generate import generate


@pytest.fixture
def model() -> Transformer:
    model = Transformer(ModelConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=1, init_std=0.5))
    init_parameters(model, 0)
    return model


PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_prompt_is_continued_and_the_same_generator_gives_the_same_text(model):
    texts = [generate(model, PROMPT, 20, generator=source(seed)) for seed in (0, 0, 1)]
    assert texts[0].shape == (2, 23) and torch.equal(texts[0][:, :3], PROMPT)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_temperature_zero_takes_the_likeliest_token_as_top_1_does(model):
    text = generate(model, PROMPT, 10, temperature=0)
    with torch.no_grad():
        assert torch.equal(model(text)[:, 2:-1].argmax(-1), text[:, 3:])
    assert torch.equal(text, generate(model, PROMPT, 10, top_k=1))


def test_only_the_k_likeliest_tokens_are_sampled_and_all_of_them(model):
    many = PROMPT[:1].expand(600, 3)
    with torch.no_grad():
        logits = model(PROMPT[:1])[0, -1]
    drawn = set(generate(model, many, 1, top_k=3, temperature=5.0, generator=source())[:, -1].tolist())
    assert drawn == set(logits.topk(3).indices.tolist())


def test_frequencies_follow_the_softmax_at_the_temperature(model):
    n = 20000
    drawn = generate(model, PROMPT[:1].expand(n, 3), 1, temperature=2.0, generator=source())[:, -1]
    with torch.no_grad():
        expected = n * (model(PROMPT[:1])[0, -1].double() / 2).softmax(-1)
    counted = drawn.bincount(minlength=50)
    # Bernstein: one of 50 counts is further off than this with a probability of 1e-6.
    log = torch.tensor(2 * 50 / 1e-6).log()
    assert ((counted - expected).abs() < log / 3 + (log**2 / 9 + 2 * log * expected).sqrt()).all()


def test_tokens_before_the_context_do_not_matter(model):
    other = torch.cat((PROMPT.flip(0), PROMPT), dim=1)
    same = generate(model, PROMPT, 8, context_len=3, generator=source())
    assert torch.equal(generate(model, other, 8, context_len=3, generator=source())[:, 3:], same)
    assert not torch.equal(generate(model, other, 8, generator=source())[:, 3:], same)


def test_more_tokens_than_the_model_accepts_can_be_generated():
    model = Transformer(ModelConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=1, max_seq_len=4))
    assert generate(model, PROMPT, 6).shape == (2, 9)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode_and_without_gradients(model, training):
    model.train(training)
    assert not generate(model, PROMPT, 1).requires_grad
    assert model.training == training


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        (PROMPT[:, :0], {}, r"prompt has shape \(2, 0\)"),
        (PROMPT[0], {}, r"prompt has shape \(3,\)"),
        (PROMPT, {"temperature": -1.0}, r"temperature=-1\.0"),
        (PROMPT, {"top_k": 0}, "top_k=0"),
        (PROMPT, {"context_len": 0}, "context_len=0"),
    ],
)
def test_an_impossible_request_is_refused(model, prompt, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, 1, **arguments)
