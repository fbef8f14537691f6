"""The model parity runs on: the package's transformer, with parameters that make the rare cases happen."""

import torch
from torch import Tensor, nn

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.transformer import IGNORE, Transformer

# Samples 20, 60, 100, ... use `rare`. In steps of 26 samples these are one in step 0, in another part of the batch one
# in step 2 and one in step 3, and none in steps 1 and 4.
RARE_EVERY = 40


class Probe(Transformer):
    """A transformer and three more parameters of the size of a hidden state, and a buffer.

    rare: used by one sample in forty: by one rank, in one micro-batch, and in some steps by none. It lies among the
        parameters of the last layer, so that the gradients of the layers before it come while it is still awaited.
    never: used by none; its gradient stays None and the optimizer leaves it alone.
    frozen: used, but takes no gradient.
    offset: a buffer, whose values every rank must have from the first one.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.model.layers[-1].rare = nn.Parameter(torch.ones(config.hidden_size))
        self.never = nn.Parameter(torch.ones(config.hidden_size))
        self.frozen = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)
        self.register_buffer("offset", torch.ones(config.hidden_size))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        address: DropoutAddress,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The transformer's loss sum and count, plus a term of each counted token of the rare samples."""
        loss_sum, count = super().forward(tokens, labels, address=address, positions=positions)
        chosen = address.samples % RARE_EVERY == RARE_EVERY // 2
        if chosen.any():
            rare = self.model.layers[-1].rare
            counted = (labels[chosen] != IGNORE).to(rare.dtype)  # (r, s)
            hidden = self.model.embed_tokens(tokens[chosen])  # (r, s, h)
            extra = hidden * rare * self.frozen + 0.1 * self.offset * rare.square()
            loss_sum = loss_sum + (extra.sum(-1) * counted).sum()
        return loss_sum, count
