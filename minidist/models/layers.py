"""The parts of a block: normalisation, rotary positions, grouped-query attention and the gated feed-forward layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.models.config import ModelConfig

# cos and sin of every position, each (s, 1, head_dim); the first half of sin is negated.
Rotary = tuple[Tensor, Tensor]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower floating dtypes, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """RMSNorm, `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467).

    Computed in at least float32, returned in the dtype of `x`.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` (..., h)."""
        dtype = at_least_float32(x.dtype)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Return RoPE's cos and sin for `positions` (s,), (s, 1, head_dim) each (arXiv 2104.09864, section 3.4.2).

    They are at least float32. Hugging Face's convention: features `i` and `i + head_dim / 2` are rotated as a pair, by
    the angle `position * theta^(-2 i / head_dim)`.
    """
    dtype = at_least_float32(dtype)
    exponent = torch.arange(0, head_dim, 2, device=positions.device).to(dtype) / head_dim
    angle = positions.to(dtype)[:, None, None] * (1.0 / theta**exponent)  # (s, 1, head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary position embedding to x (b, s, heads, head_dim). rotary: the tables of its s positions."""
    cos, sin = rotary
    # Rolling by half a head swaps the halves; with the sign in sin this is x cos + rotate_half(x) sin, in one copy.
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and value head (GQA, arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.hidden_size
        kv = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Apply attention: (b, s, h) -> (b, s, h). rotary: from `rotary_tables`, for the s positions."""
        # The number of heads follows from the projections, of which a tensor-parallel rank holds a shard.
        heads = (-1, self.head_dim)
        query = apply_rotary(self.q_proj(hidden).unflatten(-1, heads), rotary)  # (b, s, heads, d)
        key = apply_rotary(self.k_proj(hidden).unflatten(-1, heads), rotary)  # (b, s, kv_heads, d)
        value = self.v_proj(hidden).unflatten(-1, heads)
        mixed = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))  # (b, heads, s, d)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute `softmax(q k^T / sqrt(d)) v` under the causal mask; returns the shape of query.

        query: (b, heads, s, d). key, value: (b, kv_heads, s, d), each shared by heads / kv_heads consecutive query
        heads.
        """
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class SwiGLU(nn.Module):
    """The feed-forward layer, `down_proj(silu(gate_proj(x)) * up_proj(x))`.

    Shazeer 2020, arXiv 2002.05202, equation 6.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the layer: (b, s, h) -> (b, s, h)."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
