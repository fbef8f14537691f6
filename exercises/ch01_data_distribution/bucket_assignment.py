"""Assign parameters to buckets.

Gradients are all-reduced in buckets. Assign each parameter to a bucket: a bucket takes the next parameter if it fits,
so that there are few messages, and no parameter is split.

sizes: bytes of each gradient by parameter name, in the order in which backward computes them. limit: maximum bytes
of a bucket. first: maximum bytes of the first bucket, so that communication starts early; it never raises the limit.
Returns a list of lists of names, in the order of `sizes`; no bucket is empty. A parameter larger than the limit has a
bucket of its own.
Example: sizes {"a": 2, "b": 3, "c": 4, "d": 9, "e": 1} with limit 6 give [["a", "b"], ["c"], ["d"], ["e"]]; with
    first=2 they give [["a"], ["b"], ["c"], ["d"], ["e"]], since 3 + 4 exceeds 6.

Checked: that every name is in exactly one bucket, in order; the limits; that no bucket ends early; and `first`.

You may call:
    sizes.items()   (name, bytes) pairs in order; list.append; min(a, b)

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
