"""The shape of a model and its parameter count."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder-only transformer. The default has 0.8 million parameters and learns on a laptop."""

    vocab_size: int = 256
    """Number of different tokens. 256 reads text byte by byte."""
    hidden_size: int = 128
    """Features of one token between the blocks."""
    intermediate_size: int = 384
    """Features inside the feed-forward layer."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Query heads of attention. Divides hidden_size."""
    num_kv_heads: int = 2
    """Key and value heads of attention; each serves num_heads / num_kv_heads query heads. Divides num_heads."""
    max_seq_len: int = 1024
    """Longest sequence the model accepts, in tokens. Costs no memory."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = True
    """Use the token embedding as output head too."""
    dropout: float = 0.0
    """Probability of zeroing a feature of the embedding and of each residual branch, in training."""
    init_std: float = 0.05
    """Standard deviation of the initial weights. 0.05 suits some hundred features; large models use 0.02."""

    @property
    def head_dim(self) -> int:
        """Number of features of one attention head."""
        return self.hidden_size // self.num_heads

    def validate(self) -> None:
        """Raise ValueError if the fields contradict each other; the message lists the possible values."""
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: it must be at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; "
                f"possible: {_format_numbers(_even_head_counts(self.hidden_size))}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} gives heads of {self.head_dim} "
                "features, and rotary positions need an even number; "
                f"possible num_heads: {_format_numbers(_even_head_counts(self.hidden_size))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                f"possible: {_format_numbers(_divisors(self.num_heads))}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: it must be at least 0 and less than 1")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be greater than 0")

    def num_layer_parameters(self) -> int:
        """Return the number of parameters of one layer."""
        h, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        attention = 2 * h * h + 2 * h * kv
        feed_forward = 3 * h * self.intermediate_size
        return attention + feed_forward + 2 * h

    def num_parameters(self) -> int:
        """Return the total number of parameters; tied matrices count once."""
        h = self.hidden_size
        matrices = 1 if self.tie_embeddings else 2
        return matrices * self.vocab_size * h + self.num_layers * self.num_layer_parameters() + h


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _even_head_counts(hidden_size: int) -> list[int]:
    """Return the numbers of heads that give heads with an even number of features."""
    return [n for n in _divisors(hidden_size) if hidden_size // n % 2 == 0]


def _format_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if numbers else "none, hidden_size must be even"
