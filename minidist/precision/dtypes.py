"""A policy in torch's terms, and a model brought to the format that its policy computes in."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from minidist.parameters import named_parameters
from minidist.precision.policy import HALF_DTYPES, TORCH_NAMES, Policy


@dataclass(frozen=True)
class PrecisionDtypes:
    """The dtype of each thing, as in `Policy`. master: None where updated parameters are rounded stochastically."""

    parameter: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    state: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, policy: Policy) -> "PrecisionDtypes":
        def dtype(name: str | None) -> torch.dtype | None:
            return None if name is None else getattr(torch, TORCH_NAMES[name])

        return cls(
            dtype(policy.parameter),
            dtype(policy.accumulate),
            dtype(policy.reduce),
            dtype(policy.state),
            dtype(policy.master),
        )

    def at_least(self, dtype: torch.dtype) -> "PrecisionDtypes":
        """The same, but nothing narrower than `dtype`."""
        wide = {f.name: getattr(self, f.name) for f in fields(self)}
        return PrecisionDtypes(**{name: d if d is None else torch.promote_types(d, dtype) for name, d in wide.items()})


def cast_parameters(model: nn.Module, policy: Policy) -> tuple[PrecisionDtypes, dict[str, Tensor]]:
    """Bring the model's parameters to the format of the policy; returns the formats of everything, and what they were.

    Only a policy of 16 bits makes a parameter narrower; a model in float64 stays there under fp32. The values, by
    global name, are what masters are made from: a rounded parameter has lost what its master is for. Buffers stay.
    """
    formats, values = PrecisionDtypes.of(policy), {}
    for name, parameter in named_parameters(model).items():
        if policy.parameter not in HALF_DTYPES:
            formats = formats.at_least(parameter.dtype)
        values[name] = parameter.data
        parameter.data = parameter.data.to(formats.parameter)
    return formats, values
