"""A decoder-only transformer with the parameter names of Hugging Face's Llama."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.models.config import ModelConfig
from minidist.models.dropout import DropoutAddress, DropoutKeys, dropout, dropout_site
from minidist.models.layers import Attention, FeedForward, RMSNorm, Rotary, at_least_float32, rotary_tables

# A label with this value does not count: neither in the loss sum nor in the count.
IGNORE_INDEX = -100

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Block(nn.Module):
    """Attention and feed-forward layer, each on a normalised copy of the residual stream (pre-norm)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.dropout = config.dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: Tensor, rotary: Rotary, keys: tuple[DropoutKeys, DropoutKeys] | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h). `keys` are those of `dropout_keys`; without them nothing is dropped."""
        branch = self.self_attn(self.input_layernorm(hidden), rotary)
        hidden = hidden + (branch if keys is None else dropout(branch, self.dropout, keys[0]))
        branch = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (branch if keys is None else dropout(branch, self.dropout, keys[1]))


class Decoder(nn.Module):
    """Embedding, blocks and final norm: tokens in, hidden states out."""

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
        """(b, s) int64 -> (b, s, h), by all layers or by some of them.

        layers: which; all when None. hidden: (b, s, h), what the layer before the first of them gave; from layer 0 on
        the tokens are embedded. Only after the last layer comes the final norm.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        layers = range(len(self.layers)) if layers is None else layers
        if layers.start == 0:
            hidden = self.embed(tokens, address)
        rotary = self.rotary(positions, hidden.dtype)
        for index in layers:
            hidden = self.layers[index](hidden, rotary, self.dropout_keys(index, address))
        return self.norm(hidden) if layers.stop == len(self.layers) else hidden

    def embed(self, tokens: Tensor, address: DropoutAddress | None) -> Tensor:
        """(b, s) int64 -> (b, s, h), with dropout in training."""
        hidden = self.embed_tokens(tokens)
        if not self._drops(address):
            return hidden
        return dropout(hidden, self.config.dropout, address.keys(0, self.config.hidden_size))

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations that every block applies to queries and keys at these positions (s,).

        Those of the last call are kept: whoever gives the same tensor again gets them, in every micro-batch.
        """
        if self._rotary is None or self._rotary[0] is not positions or self._rotary[1] != dtype:
            tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)
            self._rotary = positions, dtype, tables
        return self._rotary[2]

    def dropout_keys(self, layer: int, address: DropoutAddress | None) -> tuple[DropoutKeys, DropoutKeys] | None:
        """The keys of the two residual branches of a layer, or None when nothing is dropped.

        Raises ValueError when dropout is on, the model is in training and there is no address.
        """
        if not self._drops(address):
            return None
        width = self.config.hidden_size
        return address.keys(dropout_site(layer, 0), width), address.keys(dropout_site(layer, 1), width)

    def _drops(self, address: DropoutAddress | None) -> bool:
        if not self.training or self.config.dropout == 0:
            return False
        if address is None:
            raise ValueError(
                f"dropout={self.config.dropout} in training needs a DropoutAddress: "
                "pass address=..., or call model.eval()"
            )
        return True


class Transformer(nn.Module):
    """The language model. `lm_head` shares the embedding's tensor when the config ties them.

    The constructor leaves torch's own random values; `init_parameters` sets those of this project. Raises ValueError
    when the config is impossible.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        config.validate()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = cross_entropy_sum  # where ranks share the vocabulary, another with the same arguments
        self.tie()
        self.register_load_state_dict_pre_hook(_complete_ties)
        self.register_load_state_dict_post_hook(_tie)

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
        """Logits (b, s, vocab) without labels; with labels the sum of the token losses and the number of tokens in it.

        tokens: (b, s) int64. labels: (b, s) int64, already shifted; those equal to IGNORE do not count.
        address: where dropout is in the run; needed in training when dropout is on.
        positions: (s,) int64, positions in the unsplit sequence; 0 to s - 1 when not given.
        layers, hidden: as in `Decoder`; unless the last layer is among them the result is the hidden state (b, s, h).
        The sum is in nats and in at least float32, the count int64. Raises ValueError when s exceeds `max_seq_len`.
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

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(b, s) int64 -> (b, vocab): of the token that follows."""
        return self.lm_head(self.model(tokens)[:, -1])

    def tie(self) -> None:
        """Make the head share the embedding's tensor again, where the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        # `to_empty` and a move off the meta device make a new parameter for every module, and so untie.
        super()._apply(fn, recurse)
        self.tie()
        return self


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies (nats, at least float32) over labels that count, and their number (int64).

    logits: (b, s, vocab); labels: (b, s) int64. With no label that counts the sum is 0, and so are its gradients.
    """
    logits = logits.flatten(0, 1).to(at_least_float32(logits.dtype))
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (labels != IGNORE_INDEX).sum()


def _tie(model: Transformer, _) -> None:
    model.tie()  # load_state_dict(assign=True) unties


def _complete_ties(model: Transformer, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Let a state dict name a tied tensor once or twice; refuse two different tensors."""
    if not model.config.tie_embeddings:
        return
    head, embedding = prefix + _HEAD, prefix + _EMBEDDING
    if head in state and embedding in state:
        if state[head].device.type != "meta" and not torch.equal(state[head], state[embedding]):
            raise ValueError(f"{head} and {embedding} differ, and this model ties them: set tie_embeddings=False")
    elif head in state or embedding in state:
        state[head] = state[embedding] = state[head] if head in state else state[embedding]
