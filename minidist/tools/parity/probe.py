"""The model parity runs on: the package's transformer, with parameters that make the rare cases happen."""

import torch
from torch import Tensor, nn

from minidist.labels import IGNORE_INDEX
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.transformer import Transformer

# Samples 35, 75, 115 use `rare`. In steps of 29 samples that is none in step 0, one in each of steps 1, 2 and 3, in
# another part of the global batch each time, and none in step 4.
RARE_EVERY, RARE_AT = 40, 35


class EdgeCaseTransformer(Transformer):
    """A transformer with three unusual parameters and a buffer, which a wrong layout would treat wrongly.

    rare: a parameter used by one sample in forty, so in a step by one micro-batch of one rank, or by none, as in the
    first step. It belongs to the last layer, so gradients of earlier layers are ready while its own is still awaited.
    never: an unused parameter; its gradient stays None and the optimizer does not update it.
    frozen: a parameter that is used but does not require a gradient.
    offset: a buffer that is broadcast from the first rank.

    All sizes of the transformer are multiples of the number of ranks. `rare`, `frozen` and `offset` have one element
    more than a hidden state, so that ZeRO's flat parameters end in padding.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        size = config.hidden_size + 1
        self.model.layers[-1].rare = nn.Parameter(torch.ones(size))
        self.never = nn.Parameter(torch.ones(config.hidden_size))
        self.frozen = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_buffer("offset", torch.ones(size))

    def forward(self, tokens: Tensor, labels: Tensor, *, address: DropoutAddress, **options) -> Tensor | tuple:
        """Return the transformer's (loss sum, token count); samples that use the parameter `rare` add to the loss.

        They add a term for each counted token. It depends on the parameters `rare` and `frozen` and the buffer
        `offset`, which every layout has unsharded on the ranks that compute the loss. A pipeline stage that is not the
        last returns its hidden state instead.
        """
        out = super().forward(tokens, labels, address=address, **options)
        if isinstance(out, Tensor):  # not the last pipeline stage
            return out
        loss_sum, count = out
        chosen = address.samples % RARE_EVERY == RARE_AT
        if chosen.any():
            rare = self.model.layers[-1].rare
            extra = rare * self.frozen + 0.1 * self.offset * rare.square()  # (h + 1,)
            loss_sum = loss_sum + extra.sum() * (labels[chosen] != IGNORE_INDEX).sum()
        return loss_sum, count
