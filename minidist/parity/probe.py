"""The model parity runs on: the package's transformer, with parameters that make the rare cases happen."""

import torch
from torch import Tensor, nn

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.transformer import IGNORE, Transformer


class Probe(Transformer):
    """A transformer and three more parameters of the size of a hidden state, and a buffer.

    rare: used by every fifth sample only, so by some ranks, in some micro-batches, in some steps.
    never: used by none; its gradient stays None and the optimizer leaves it alone.
    frozen: used, but takes no gradient.
    offset: a buffer, whose values every rank must have from the first one.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.rare = nn.Parameter(torch.ones(config.hidden_size))
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
        chosen = address.samples % 5 == 3
        if chosen.any():
            counted = (labels[chosen] != IGNORE).to(self.rare.dtype)  # (r, s)
            hidden = self.model.embed_tokens(tokens[chosen])  # (r, s, h)
            extra = hidden * self.rare * self.frozen + 0.01 * self.offset * self.rare.square()
            loss_sum = loss_sum + (extra.sum(-1) * counted).sum()
        return loss_sum, count
