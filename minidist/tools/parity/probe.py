"""The model parity runs on: the package's transformer, with parameters that make the rare cases happen."""

import torch
from torch import Tensor, nn

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress
from minidist.models.transformer import IGNORE_INDEX, Transformer

# Samples 35, 75, 115 use `rare`. In steps of 29 samples that is none in step 0, one in each of steps 1, 2 and 3, in
# another part of the global batch each time, and none in step 4.
RARE_EVERY, RARE_AT = 40, 35


class ProbeModel(Transformer):
    """A transformer and three more parameters, and a buffer.

    All sizes of the transformer divide by the number of ranks. Three of these do not: one element more than a hidden
    state has, so that the rows that ZeRO cuts into shards end in padding.

    rare: used by one sample in forty: by one rank, in one micro-batch, in some steps by none, and not in the first. It
        lies among the parameters of the last layer: those of the layers before it come while it is still awaited.
    never: used by none; its gradient stays None and the optimizer leaves it alone.
    frozen: used, but takes no gradient.
    offset: a buffer, whose values every rank must have from the first one.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        size = config.hidden_size + 1
        self.model.layers[-1].rare = nn.Parameter(torch.ones(size))
        self.never = nn.Parameter(torch.ones(config.hidden_size))
        self.frozen = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_buffer("offset", torch.ones(size))

    def forward(self, tokens: Tensor, labels: Tensor, *, address: DropoutAddress, **how) -> Tensor | tuple:
        """The transformer's loss sum and count, plus a term of each counted token of the rare samples.

        The term is a function of parameters that every layout has where the loss is, and of nothing that it cuts.
        """
        out = super().forward(tokens, labels, address=address, **how)
        if isinstance(out, Tensor):  # not the end of the model
            return out
        loss_sum, count = out
        chosen = address.samples % RARE_EVERY == RARE_AT
        if chosen.any():
            rare = self.model.layers[-1].rare
            extra = rare * self.frozen + 0.1 * self.offset * rare.square()  # (h + 1,)
            loss_sum = loss_sum + extra.sum() * (labels[chosen] != IGNORE_INDEX).sum()
        return loss_sum, count
