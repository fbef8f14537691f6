"""Assign gradients to buckets.

Gradients are all-reduced in buckets. Assign each gradient to a bucket: a bucket takes the next one if it fits, so that
there are few messages, and no gradient is split.

sizes: bytes of each gradient by parameter name, in the order in which backward computes them. limit: maximum bytes
of a bucket. Returns a list of lists of names, in the order of `sizes`; no bucket is empty. A gradient larger than the
limit has a bucket of its own.
Example: sizes {"a": 2, "b": 3, "c": 4, "d": 9, "e": 1} with limit 6 give [["a", "b"], ["c"], ["d"], ["e"]].

Checked: that every name is in exactly one bucket, in order; the limit; that no bucket ends early; no names at all; and
that `sizes` keeps its content.

You may call:
    sizes.items()   (name, bytes) pairs in order; list.append

Check it with: python -m exercises check bucket_assignment

Stub 36ecaff3.
"""

from collections.abc import Mapping


def assign_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Assign gradients to buckets; return the names in each bucket, in the order of `sizes`. No bucket is empty.

    A bucket takes the next gradient if it fits; one larger than `limit` has a bucket of its own. sizes: bytes of each
    gradient by name, in the order in which backward computes them. limit: maximum bytes of a bucket.
    """
    raise NotImplementedError("return the names in each bucket")
