"""divides_evenly: a list comes back where an array is asked for"""


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return list(range(start, start + size + (rank < longer)))
