"""Assign parameters to buckets.

Write the missing lines of assign; its docstring specifies the result.
You may call: min, max, sum, len, list.append, dict.items.
Check it with: python -m exercises check bucket_assignment

Stub f366e874.
"""

from collections.abc import Mapping


def assign(sizes: Mapping[str, int], limit: int, first: int | None = None) -> list[list[str]]:
    """Cut parameter names into buckets of consecutive names, in the order of `sizes`, each of at most `limit` bytes.

    A bucket takes the next name as long as it fits. A parameter larger than the limit has a bucket of its own.

    sizes: name to bytes. first: a smaller limit for the first bucket; None: `limit`.
    """
    raise NotImplementedError("return the names of each bucket")
