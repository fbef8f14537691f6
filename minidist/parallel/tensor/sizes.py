"""Which models a number of ranks can share."""


def check(config, size: int) -> None:
    """Raise ValueError, with the sizes that would do, when `size` ranks cannot share a model of this ModelConfig."""
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        whole = getattr(config, name)
        if whole % size:
            possible = [n for n in range(1, min(whole, 4 * size) + 1) if whole % n == 0]
            more = "" if name == "num_heads" else f"; or {name}={-(-whole // size) * size}"
            raise ValueError(
                f"{name}={whole} cannot be shared equally by tp={size} ranks; possible tp: {_listed(possible)}{more}"
            )
    heads = config.num_kv_heads
    if heads % size and size % heads:
        possible = [
            n for n in range(1, config.num_heads + 1) if not config.num_heads % n and not (heads % n and n % heads)
        ]
        raise ValueError(
            f"num_kv_heads={heads} and tp={size}: one must divide the other, or a head would be cut; "
            f"possible tp: {_listed(possible)}"
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
