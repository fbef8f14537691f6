"""Assign parameters to buckets.

Write the missing lines of assign_buckets; its docstring specifies the result.
You may call: min, max, sum, len, list.append, dict.items.
Check it with: python -m exercises check bucket_assignment

Stub ccff30d1.
"""

from collections.abc import Mapping


def assign_buckets(sizes: Mapping[str, int], limit: int, first: int | None = None) -> list[list[str]]:
    """Assign parameters to gradient buckets; return the parameter names of each bucket.

    A bucket takes consecutive names of `sizes` as long as they fit; a parameter larger than the limit has a bucket of
    its own. sizes: bytes of each gradient, by parameter name, in the order in which backward computes the gradients.
    limit: maximum bytes of a bucket. first: maximum bytes of the first bucket if smaller than `limit`; None means
    `limit`.
    """
    raise NotImplementedError("return the names of each bucket")
