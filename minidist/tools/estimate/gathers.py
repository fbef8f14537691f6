"""How often ZeRO stage 3 gathers each block (each layer of the model) in a step. Needs no torch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minidist.zero.plan import ROOT


def count_all_gathers(
    actions: Iterable[tuple[str, int]],
    chunk_layers: Sequence[range],
    has_embedding_and_head: Sequence[tuple[bool, bool]],
    keep_last_block: bool,
) -> Counter[int]:
    """Count how often ZeRO-3 gathers the parameters of each layer while a rank of a pipeline runs `actions`.

    Returns the number of all-gathers by layer number; ROOT stands for the parameters outside of all layers.

    actions: (kind, chunk number) in order; kind is "F" (forward), "B" (backward), or "end" after the last backward
    action of a micro-batch, which frees all gathered parameters. chunk_layers: by chunk, its layer numbers.
    has_embedding_and_head: by chunk, whether it has the embedding and whether it has the head. keep_last_block: whether
    the model's last layer and the head stay gathered from forward to backward.
    """
    there: set[int] = set()
    found: Counter[int] = Counter()
    in_backward = None

    def need(block: int) -> None:
        found[block] += block not in there
        there.add(block)

    for kind, chunk in actions:
        has_embedding, has_head = has_embedding_and_head[chunk]
        if kind == "end":
            there.clear()
            in_backward = None
            continue
        if has_head or (has_embedding and kind == "F"):
            need(ROOT)
        if kind == "F":
            for block in chunk_layers[chunk]:
                need(block)
                if not (keep_last_block and has_head and block == chunk_layers[chunk][-1]):
                    there.discard(block)
            if not (keep_last_block and has_head):
                there.discard(ROOT)
        else:
            for block in reversed(chunk_layers[chunk]):
                there.discard(in_backward)  # its backward is over
                need(block)
                in_backward = block
    return found
