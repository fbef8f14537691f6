"""Cases of a parametrized test that `make test-all` runs and `make test` does not."""

import pytest


def exhaustive(*cases) -> list:
    """Mark cases as exhaustive: `parametrize("size", [2, *exhaustive(3, 4)])`. A tuple is a case of several values."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive) for case in cases
    ]
