"""Sizes of the slots and messages of the backend shm. Needs no torch, because the memory estimate uses it too."""

SLOTS = 3  # of each size, of every group on every rank
SMALL_BYTES = 16 * 1024  # of a slot for small tensors
LARGE_BYTES = 2**20  # of a slot for large tensors, if there is room: more hardly helps and leaves the cache
ALIGN = 64  # bytes: a cache line, and a multiple of every element's size

# Up to this many bytes in all, every rank reduces everything; beyond, dividing the work is worth a barrier.
ONE_MEETING_BYTES = 2**20

EAGER_BYTES = 16 * 1024  # the largest transfer that is sent within its first message
PIECE_BYTES = 512 * 1024  # of a chunk of a larger transfer; two are in flight


def even_chunk_length(n: int, longest: int) -> int:
    """Return a chunk length of at most `longest` that cuts `n` elements into the fewest chunks of similar size."""
    count = max(1, -(-n // longest))
    return min(longest, max(1, -(-n // count // ALIGN)) * ALIGN)
