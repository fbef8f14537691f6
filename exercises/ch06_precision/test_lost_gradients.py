"""Tests of lost_gradients."""

from exercises.testing import expect, test


@test(points=14)
def equals_one_process(answer):
    """To come."""
    expect("to come", 0, 1)
