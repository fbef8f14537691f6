"""Tensor shapes as formulas: `b s/cp h` is (batch, this rank's shard of the sequence, hidden size)."""

import math
from dataclasses import dataclass

from minidist.tools.estimate.layout import RunLayout


@dataclass(frozen=True)
class Dimensions:
    """Computes local shapes from shape formulas such as "b s/cp h", by the sizes that the names in them stand for.

    sizes: the full size by name. b: samples; s: tokens per sample; h: hidden size; heads: query heads; kv: key-value
    heads; d: head size; f: intermediate size of the feed-forward layer; vocab: vocabulary size; exchanged: query, key
    and value heads that a rank exchanges in Ulysses attention. A number in a formula stands for itself.

    axis_sizes: the number of ranks over which `/tp`, `/cp` and `/sp` in a formula divide a dimension; sp is tp with
    sequence parallelism and 1 without.
    """

    sizes: dict[str, int]
    axis_sizes: dict[str, int]

    @classmethod
    def of_micro_batch(cls, layout: RunLayout, num_samples: int = 1) -> "Dimensions":
        """Make the dimensions of a micro-batch of `num_samples` samples, for a run with this layout."""
        model = layout.config.model
        sizes = {
            "b": num_samples,
            "s": layout.config.data.seq_len,
            "h": model.hidden_size,
            "heads": model.num_heads,
            "kv": model.num_kv_heads,
            "d": model.head_dim,
            "f": model.intermediate_size,
            "vocab": model.vocab_size,
        }
        dimensions = cls(sizes, {"tp": layout.mesh.tp, "cp": layout.mesh.cp, "sp": layout.sequence_parallel_size})
        # Key-value heads are repeated until the context-parallel ranks can divide them evenly.
        heads, kv = dimensions.local_shape("heads/tp kv/tp")
        sizes["exchanged"] = heads + 2 * math.lcm(kv, layout.mesh.cp)
        return dimensions

    def local_shape(self, formula: str) -> tuple[int, ...]:
        """Return the shape, in elements, that a formula such as "b s/cp h" stands for on one rank.

        `minidist.validation` has checked that dimensions divide evenly. Only key-value heads may be fewer than tp
        ranks: each rank then has one whole head, so a size is rounded up.
        """
        return tuple(self._local_size(word) for word in formula.split())

    def local_numel(self, formula: str) -> int:
        """Return the number of elements of a tensor on one rank, given its shape as a formula such as "b s/cp h"."""
        return math.prod(self.local_shape(formula))

    def _local_size(self, word: str) -> int:
        """Return the size that a word of a formula, such as "s/cp", stands for; rounded up."""
        name, *axes = word.split("/")
        full = int(name) if name.isdigit() else self.sizes[name]
        return -(-full // math.prod(self.axis_sizes[axis] for axis in axes))
