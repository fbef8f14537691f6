"""Sizes of the slots and messages of the backend shm. Needs no torch, because the memory estimate uses it too."""

SLOTS = 3  # of each size, of every group on every rank
SMALL_BYTES = 16 * 1024  # of a slot for small tensors
LARGE_BYTES = 2**20  # of a slot for large tensors, if there is room: more hardly helps and leaves the cache
ALIGN = 64  # bytes: a cache line, and a multiple of every element's size

# Up to this many bytes in all, every rank reduces everything; beyond, dividing the work is worth a barrier.
SINGLE_BARRIER_BYTES = 2**20

EAGER_BYTES = 16 * 1024  # the largest transfer that is sent within its first message
TRANSFER_CHUNK_BYTES = 512 * 1024  # of a chunk of a larger transfer; two are in flight


def even_chunk_length(numel: int, max_length: int) -> int:
    """Return the chunk length, in elements, that cuts `numel` elements into the fewest chunks of similar length.

    max_length: the largest length that may be returned. Shorter ones are multiples of 64 elements.
    """
    count = max(1, -(-numel // max_length))
    return min(max_length, max(1, -(-numel // count // ALIGN)) * ALIGN)
