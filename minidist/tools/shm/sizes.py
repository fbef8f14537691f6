"""Sizes of the slots and messages of the backend shm. Needs no torch, because the memory estimate uses it too."""

SLOTS = 3  # slots of each size (small and large) that a group has on every rank
SMALL_BYTES = 16 * 1024  # size of a slot for small tensors
LARGE_BYTES = 2**20  # size of a slot for large tensors, if memory is free; larger slots hardly help and leave the cache
ALIGN = 64  # bytes: a cache line, and a multiple of every element's size

# Up to this many bytes in all, every rank reduces everything; beyond, dividing the work is worth a barrier.
SINGLE_BARRIER_BYTES = 2**20

EAGER_BYTES = 16 * 1024  # the largest transfer that is sent within its first message
TRANSFER_CHUNK_BYTES = 512 * 1024  # size of a chunk of a larger transfer; two chunks are in flight


def even_chunk_length(numel: int, max_length: int) -> int:
    """Return the chunk length, in elements, that cuts `numel` elements into the fewest chunks, of similar length.

    max_length: the longest chunk allowed, in elements. The result is `max_length` or a multiple of 64 below it.
    """
    count = max(1, -(-numel // max_length))
    return min(max_length, max(1, -(-numel // count // ALIGN)) * ALIGN)
