"""Tensor shapes as formulas: `b s/cp h` is (batch, this rank's shard of the sequence, hidden size)."""

import math
from dataclasses import dataclass

from minidist.tools.estimate.layout import Layout


@dataclass(frozen=True)
class Dimensions:
    """The value of each name in a shape formula.

    b: samples; s: tokens per sample; h: hidden size; heads: query heads; kv: key-value heads; d: head size; f:
    intermediate size of the feed-forward layer; vocab: vocabulary size; exchanged: query, key and value heads that a
    rank exchanges in Ulysses attention. A number stands for itself. `/tp`, `/cp` and `/sp` divide a dimension over a
    mesh axis; sp is tp with sequence parallelism and 1 without.
    """

    sizes: dict[str, int]
    axes: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, samples: int = 1) -> "Dimensions":
        model = layout.config.model
        sizes = {
            "b": samples,
            "s": layout.config.data.seq_len,
            "h": model.hidden_size,
            "heads": model.num_heads,
            "kv": model.num_kv_heads,
            "d": model.head_dim,
            "f": model.intermediate_size,
            "vocab": model.vocab_size,
        }
        found = cls(sizes, {"tp": layout.mesh.tp, "cp": layout.mesh.cp, "sp": layout.sequence_parallel_size})
        # Key-value heads are repeated until the context-parallel ranks can divide them evenly.
        heads, kv = found.shape("heads/tp kv/tp")
        sizes["exchanged"] = heads + 2 * math.lcm(kv, layout.mesh.cp)
        return found

    def shape(self, formula: str) -> tuple[int, ...]:
        """The local shape on one rank. Dimensions divide evenly (`validate`), except that a head is never cut."""
        return tuple(self._local_size(word) for word in formula.split())

    def numel(self, formula: str) -> int:
        """The number of elements on one rank."""
        return math.prod(self.shape(formula))

    def _local_size(self, word: str) -> int:
        name, *axes = word.split("/")
        full = int(name) if name.isdigit() else self.sizes[name]
        return -(-full // math.prod(self.axes[axis] for axis in axes))
