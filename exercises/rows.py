"""Rows that ranks share out, written down element by element: what answers about shards are compared with."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

# An element of a row: its parameter and its place in it; None is padding.
Element = tuple[str, int] | None


def cut(sizes: Mapping[str, int], parts: int) -> list[list[Element]]:
    """The elements of each shard: parameters one behind the other, then as much padding as equal shards need."""
    row: list[Element] = [(name, index) for name, numel in sizes.items() for index in range(numel)]
    while len(row) % parts:
        row.append(None)
    shard = len(row) // parts
    return [row[part * shard : (part + 1) * shard] for part in range(parts)]


def laid_out(shard: Sequence[Element], values: Callable[[str], Tensor]) -> list[float]:
    """The numbers of a shard, of parameters whose elements are `values(name)`; padding is zero."""
    known = {name: values(name).flatten().tolist() for name in {element[0] for element in shard if element}}
    return [known[element[0]][element[1]] if element else 0.0 for element in shard]
