"""same_numbers (forbidden): torch's own checkpoint"""

from torch.utils.checkpoint import checkpoint


class _Again:
    """Not needed."""


def recomputed(run):
    """torch's own."""
    return lambda *args: checkpoint(run, *args, use_reentrant=False)
