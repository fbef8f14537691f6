"""How much shared memory is taken for what. Needs no torch: the estimate reads it too."""

SLOTS = 3  # of each size, of every group on every rank
SMALL_BYTES = 16 * 1024  # of a slot for small tensors
LARGE_BYTES = 2**20  # of a slot for large tensors, when there is room: more hardly helps, and leaves the cache
ALIGN = 64  # bytes: a cache line, and a multiple of every element's size

# That a rank reads when all ranks reduce all of it; beyond, sharing the work is worth a meeting.
ONE_MEETING_BYTES = 2**20

EAGER_BYTES = 16 * 1024  # of a transfer that lies in its message
PIECE_BYTES = 512 * 1024  # of a larger one, of which two are on their way


def even(n: int, longest: int) -> int:
    """The length of parts, at most `longest`, of which `n` elements take as few as possible, none much shorter."""
    count = max(1, -(-n // longest))
    return min(longest, max(1, -(-n // count // ALIGN)) * ALIGN)
