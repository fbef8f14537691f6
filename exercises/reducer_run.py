"""What the tests of chapter 01's gradient reducers share: local gradients, and a step with two parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exercises.conditions import FLOATS, Choices, Declaration, Tensors, exact
from minidist.comm import Group
from minidist.parameters import named_parameters

# Makes the learner's reducer: (answer, parameters by name, group, and further arguments of the declaration) -> reducer.
MakeReducer = Callable[..., Any]


def local_gradient(
    name: str, shape: Sequence[int], rank: int, step: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the local gradient of one rank: integers, in float64 plus a fraction that float32 cannot represent.

    Sums of them are exact in any order. They differ by rank, parameter, element and step.
    """
    numbers = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    return numbers + 10 * rank + 100 * step + len(name) + (2.0**-40 if dtype == torch.float64 else 0)


def grad_of(parameters: Mapping[str, Tensor], name: str) -> Any:
    """Return the gradient as nested lists, or None."""
    grad = parameters[name].grad
    return None if grad is None else grad.tolist()


def declare_reducer(make_reducer: MakeReducer, **choices: Choices) -> Declaration:
    """Declare a step of two parameters, of which the first rank does not use the second one.

    choices: strategies of further arguments of `make_reducer`. Besides the gradients, at most 16 bytes per parameter
    may be sent, to each other rank and back.
    """

    def reduce_gradients(answer: Any, group: Group, gradient: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        model.bias = nn.Parameter(torch.zeros(3, dtype=gradient.dtype))
        reducer = make_reducer(answer, named_parameters(model), group, **more)
        if group.rank:
            reducer.add("bias", torch.full((3,), group.rank, dtype=gradient.dtype))
        reducer.add("weight", gradient)
        reducer.finish()
        return model.weight.grad, model.bias.grad

    def reduced_by_one_process(ranks: Sequence[Mapping[str, Any]], rank: int) -> tuple[Tensor, Tensor | None]:
        dtype = ranks[0]["gradient"].dtype
        bias = torch.full((3,), sum(range(len(ranks))), dtype=dtype) if len(ranks) > 1 else None
        return sum(exact(each["gradient"]) for each in ranks).to(dtype), bias

    dtypes = (torch.float32, torch.float64, *FLOATS[2:])
    return Declaration(
        inputs={"gradient": Tensors(dtypes=dtypes, layouts=("slice", "scalar")), **choices},
        call=reduce_gradients,
        reference=reduced_by_one_process,
        changes=("gradient",),
        shares=True,
        replicas=True,
        wire=False,  # whether a parameter was used may be sent in any dtype
        max_bytes=lambda ranks: 2 * (len(ranks) - 1) * (_num_bytes(ranks[0]["gradient"]) + 2 * 16),
    )


def _num_bytes(gradient: Tensor) -> int:
    """Return the bytes of both gradients, given the first one."""
    return (gradient.numel() + 3) * gradient.element_size()
