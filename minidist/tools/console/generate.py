"""Generation of text, one token at a time."""

import torch
from torch import Tensor

from minidist.models.layers import at_least_float32
from minidist.models.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context_len: int | None = None,
) -> Tensor:
    """Sample `num_tokens` tokens after the prompt `tokens`, (b, s) int64; return both, (b, s + num_tokens).

    temperature: divides the logits; 0 always takes the most likely token.
    top_k: sample from the k most likely tokens only; None: from all.
    generator: source of the random numbers; the same state gives the same text.
    context_len: number of last tokens that the model sees; None for `max_seq_len`. A model is best at the length it was
    trained on, and nothing is cached, so each token costs one forward of this length.
    Raises ValueError for an empty prompt or an argument out of range. The model is left in the mode it was in.
    """
    context_len = model.config.max_seq_len if context_len is None else context_len
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(tokens.shape)}; it must be (batch, at least 1 token)")
    if num_tokens < 0 or temperature < 0 or (top_k is not None and top_k < 1) or context_len < 1:
        raise ValueError(
            f"num_tokens={num_tokens}, temperature={temperature}, top_k={top_k}, context_len={context_len}: "
            "num_tokens and temperature must be at least 0, top_k and context_len at least 1"
        )
    training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits = model.next_token_logits(tokens[:, -context_len:])  # (b, vocab)
            tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
    finally:
        model.train(training)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample the next token: (b, vocab) -> (b, 1) int64."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    scaled = logits.to(at_least_float32(logits.dtype)) / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        values, candidates = scaled.topk(top_k)
    else:
        values, candidates = scaled, None
    drawn = torch.multinomial(values.softmax(-1), 1, generator=generator)
    return drawn if candidates is None else candidates.gather(-1, drawn)
