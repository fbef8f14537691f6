"""Expected shards of flat parameters, element by element, for comparison with answers."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

# An element of a flat parameter: its parameter and its index in it; None is padding.
Element = tuple[str, int] | None


def shard_elements(sizes: Mapping[str, int], parts: int) -> list[list[Element]]:
    """Return the elements of each shard of the concatenated parameters, padded to shards of equal size."""
    row: list[Element] = [(name, index) for name, numel in sizes.items() for index in range(numel)]
    while len(row) % parts:
        row.append(None)
    shard = len(row) // parts
    return [row[part * shard : (part + 1) * shard] for part in range(parts)]


def shard_values(shard: Sequence[Element], values: Callable[[str], Tensor]) -> list[float]:
    """Return the values of a shard, where `values(name)` are those of a parameter; padding is zero."""
    known = {name: values(name).flatten().tolist() for name in {element[0] for element in shard if element}}
    return [known[element[0]][element[1]] if element else 0.0 for element in shard]
