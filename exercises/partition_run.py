"""What the tests of chapter 01's partitions share: calls one after the other, whose results are compared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exercises.conditions import Declaration, Drawn
from exercises.testing import index_list


def declare_partition(
    call: Callable[..., Any], reference: Callable[..., list[int]], arguments: Mapping[str, tuple]
) -> Declaration:
    """Declare a function that returns the indices of one rank's samples.

    call: (answer, *arguments) -> an array. reference: (*arguments) -> the indices. arguments: by description; the
    first ones are those of most calls.
    """
    every = list(arguments.values())
    draws = {description: number for number, description in enumerate(arguments) if number}
    return Declaration(
        inputs={"arguments": Drawn(lambda rank, ranks, draw: every[draw], draws)},
        call=lambda answer, group, arguments: _as_tensor(call(answer, *arguments)),
        reference=lambda ranks, rank: torch.tensor(reference(*ranks[rank]["arguments"]), dtype=torch.int64),
    )


def _as_tensor(indices: Any) -> Tensor:
    """Return a tensor that shares memory with the array, so that it shows what later calls write there."""
    index_list(indices)  # raises if it is no array of int64
    return torch.from_numpy(indices)
