"""Shapes as formulas: `b s/cp h` is a tensor of (batch, this rank's part of the sequence, hidden)."""

import math
from dataclasses import dataclass

from minidist.tools.estimate.layout import Layout


@dataclass(frozen=True)
class Sizes:
    """What the words of a formula stand for.

    b samples, s tokens of a sample, h hidden features, heads query heads, kv key and value heads, d features of a head,
    f features inside the feed-forward layer, vocab tokens of the vocabulary; exchanged: heads of all three kinds that a
    rank sends in ulysses; a number is itself. Behind a stroke stands an axis that divides: tp, cp, or sp, which is tp
    where its ranks share the sequence between operators.
    """

    words: dict[str, int]
    axes: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, samples: int = 1) -> "Sizes":
        model = layout.config.model
        words = {
            "b": samples,
            "s": layout.config.data.seq_len,
            "h": model.hidden_size,
            "heads": model.num_heads,
            "kv": model.num_kv_heads,
            "d": model.head_dim,
            "f": model.intermediate_size,
            "vocab": model.vocab_size,
        }
        sizes = cls(words, {"tp": layout.mesh.tp, "cp": layout.mesh.cp, "sp": layout.sequence})
        # Key and value heads that ranks cannot share equally are repeated until they can.
        heads, kv = sizes.shape("heads/tp kv/tp")
        words["exchanged"] = heads + 2 * math.lcm(kv, layout.mesh.cp)
        return sizes

    def shape(self, formula: str) -> tuple[int, ...]:
        """The shape on one rank. Sizes divide evenly (`validate`), but for heads fewer than ranks: none is cut."""
        return tuple(self._size(word) for word in formula.split())

    def numel(self, formula: str) -> int:
        return math.prod(self.shape(formula))

    def _size(self, word: str) -> int:
        name, *axes = word.split("/")
        whole = int(name) if name.isdigit() else self.words[name]
        return -(-whole // math.prod(self.axes[axis] for axis in axes))
