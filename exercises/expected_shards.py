"""Expected shards of flat parameters, element by element, for comparison with answers."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

# An element of a flat parameter: the parameter's name and the element's index in it; None is padding.
Element = tuple[str, int] | None


def shard_elements(sizes: Mapping[str, int], num_shards: int) -> list[list[Element]]:
    """Return the elements of each shard of the concatenated parameters, padded to shards of equal size."""
    flat: list[Element] = [(name, index) for name, numel in sizes.items() for index in range(numel)]
    while len(flat) % num_shards:
        flat.append(None)
    shard_size = len(flat) // num_shards
    return [flat[number * shard_size : (number + 1) * shard_size] for number in range(num_shards)]


def shard_values(shard: Sequence[Element], values: Callable[[str], Tensor]) -> list[float]:
    """Return the values of a shard, where `values(name)` are those of a parameter; padding is zero."""
    known = {name: values(name).flatten().tolist() for name in {element[0] for element in shard if element}}
    return [known[element[0]][element[1]] if element else 0.0 for element in shard]
