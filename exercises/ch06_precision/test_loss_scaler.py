"""Tests of loss_scaler."""

from exercises.testing import expect, test


@test(points=14)
def first_test(answer):
    """To come."""
    expect("to come", 0, 1)
