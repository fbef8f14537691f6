"""A decoder-only transformer with the parameter names of Hugging Face's Llama."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.labels import IGNORE_INDEX
from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress, DropoutKeys, dropout, dropout_site_index
from minidist.models.layers import Attention, RMSNorm, Rotary, SwiGLU, at_least_float32, rotary_tables

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Block(nn.Module):
    """A pre-norm transformer block: attention and feed-forward branches, each added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.dropout = config.dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor, rotary: Rotary, keys: tuple[DropoutKeys, DropoutKeys] | None = None) -> Tensor:
        """Apply the block: (b, s, h) -> (b, s, h).

        rotary: from `rotary_tables`, for the s positions. keys: from `Decoder.dropout_keys`; None disables dropout.
        """
        branch = self.self_attn(self.input_layernorm(hidden), rotary)
        hidden = hidden + (branch if keys is None else dropout(branch, self.dropout, keys[0]))
        branch = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (branch if keys is None else dropout(branch, self.dropout, keys[1]))


class Decoder(nn.Module):
    """The model without its output head: embedding, blocks and final norm. Token ids in, hidden states out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self._rotary: tuple[Tensor, torch.dtype, Rotary] | None = None

    def forward(
        self,
        tokens: Tensor,
        *,
        address: DropoutAddress | None = None,
        positions: Tensor | None = None,
        layers: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run all layers, or those in `layers`: (b, s) int64 -> (b, s, h).

        address, positions: as in `Transformer.forward`. layers: a range of layer indices; None: all. A range that
        starts at 0 embeds the tokens first; any other needs `hidden` (b, s, h), the output of the layer before it. The
        final norm follows the last layer only.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        layers = range(len(self.layers)) if layers is None else layers
        if layers.start == 0:
            hidden = self.embed(tokens, address)
        rotary = self.rotary_tables(positions, hidden.dtype)
        for index in layers:
            hidden = self.layers[index](hidden, rotary, self.dropout_keys(index, address))
        return self.norm(hidden) if layers.stop == len(self.layers) else hidden

    def embed(self, tokens: Tensor, address: DropoutAddress | None) -> Tensor:
        """Embed tokens, with dropout in training: (b, s) int64 -> (b, s, h)."""
        hidden = self.embed_tokens(tokens)
        if not self._applies_dropout(address):
            return hidden
        return dropout(hidden, self.config.dropout, address.site_keys(0, self.config.hidden_size))

    def rotary_tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Return RoPE's cos and sin for `positions` (s,), as `minidist.models.layers.rotary_tables` does.

        The last result is cached and reused if the next call passes the same tensor, as all micro-batches of a step do.
        """
        if self._rotary is None or self._rotary[0] is not positions or self._rotary[1] != dtype:
            tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)
            self._rotary = positions, dtype, tables
        return self._rotary[2]

    def dropout_keys(self, layer: int, address: DropoutAddress | None) -> tuple[DropoutKeys, DropoutKeys] | None:
        """Return the dropout keys of a layer's attention and feed-forward branches, or None if dropout is off.

        Raises ValueError if dropout is on, the model is in training and there is no address.
        """
        if not self._applies_dropout(address):
            return None
        width = self.config.hidden_size
        return address.site_keys(dropout_site_index(layer, 0), width), address.site_keys(
            dropout_site_index(layer, 1), width
        )

    def _applies_dropout(self, address: DropoutAddress | None) -> bool:
        """Whether dropout is on in this forward. Raises ValueError if it is and there is no address."""
        if not self.training or self.config.dropout == 0:
            return False
        if address is None:
            raise ValueError(
                f"dropout={self.config.dropout} in training needs a DropoutAddress: "
                "pass address=..., or call model.eval()"
            )
        return True


class Transformer(nn.Module):
    """The language model: decoder and output head, whose weight is the embedding's if the config ties them.

    The constructor leaves torch's default initialisation; call `init_parameters`. Raises ValueError for an invalid
    config.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        config.validate()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = cross_entropy_sum  # tensor parallelism replaces it by a vocabulary-parallel one
        self.tie_weights()
        self.register_load_state_dict_pre_hook(_fill_tied_weights)
        self.register_load_state_dict_post_hook(_retie_weights)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        address: DropoutAddress | None = None,
        positions: Tensor | None = None,
        layers: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (b, s, vocab), or with labels the sum of the token losses and the number of tokens in it.

        tokens: (b, s) int64. labels: (b, s) int64, already shifted; those equal to IGNORE_INDEX are ignored.
        address: determines the batch's dropout masks; required in training if dropout is on.
        positions: (s,) int64, positions in the unsplit sequence; 0 to s - 1 by default.
        layers, hidden: as in `Decoder`; if `layers` ends before the last layer, returns the hidden state (b, s, h).
        The sum is in nats, at least float32; the count is int64. Raises ValueError if s exceeds `max_seq_len`.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens for a model with max_seq_len={self.config.max_seq_len}: "
                "shorten the sequence or raise max_seq_len"
            )
        hidden = self.model(tokens, address=address, positions=positions, layers=layers, hidden=hidden)
        if layers is not None and layers.stop < self.config.num_layers:
            return hidden
        logits = self.lm_head(hidden)
        return logits if labels is None else self.loss(logits, labels)

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after the last one: (b, s) int64 -> (b, vocab)."""
        return self.lm_head(self.model(tokens)[:, -1])

    def tie_weights(self) -> None:
        """Make the output head use the embedding's weight, if `config.tie_embeddings` and this model has both.

        A pipeline stage has `nn.Identity` in place of modules that other stages hold.
        """
        ends = (self.lm_head, self.model.embed_tokens)
        if self.config.tie_embeddings and not any(isinstance(module, nn.Identity) for module in ends):
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        # `to_empty` and a move off the meta device create a new parameter for every module, which unties the weights.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' cross-entropies (nats, at least float32) and the number of tokens (int64).

    logits: (b, s, vocab). labels: (b, s) int64; IGNORE_INDEX is left out. Without any token the sum is 0, and so are
    its gradients.
    """
    logits = logits.flatten(0, 1).to(at_least_float32(logits.dtype))
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (labels != IGNORE_INDEX).sum()


def _retie_weights(model: Transformer, _) -> None:
    """Hook after load_state_dict: tie the weights again."""
    model.tie_weights()  # load_state_dict(assign=True) unties


def _fill_tied_weights(model: Transformer, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Hook before load_state_dict: accept a tied tensor under one or both names; ValueError if the two differ."""
    if not model.config.tie_embeddings:
        return
    head, embedding = prefix + _HEAD, prefix + _EMBEDDING
    if head in state and embedding in state:
        if state[head].device.type != "meta" and not torch.equal(state[head], state[embedding]):
            raise ValueError(f"{head} and {embedding} differ, and this model ties them: set tie_embeddings=False")
    elif head in state or embedding in state:
        state[head] = state[embedding] = state[head] if head in state else state[embedding]
