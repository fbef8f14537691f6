"""A precision policy as torch dtypes, and the cast of a model to its parameter dtype."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from minidist.parameters import named_parameters
from minidist.precision.policy import HALF_DTYPES, TORCH_NAMES, Policy


@dataclass(frozen=True)
class PrecisionDtypes:
    """The torch dtype of each kind of tensor; fields as in `Policy`. master: None with stochastic rounding."""

    parameter: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    state: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, policy: Policy) -> "PrecisionDtypes":
        """Return the torch dtypes of `policy`."""

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
        """Return these dtypes, each promoted to at least `dtype`."""
        wide = {f.name: getattr(self, f.name) for f in fields(self)}
        return PrecisionDtypes(**{name: d if d is None else torch.promote_types(d, dtype) for name, d in wide.items()})


def cast_parameters(model: nn.Module, policy: Policy) -> tuple[PrecisionDtypes, dict[str, Tensor]]:
    """Cast the model's parameters in place to the policy's dtype; returns all dtypes, and the values before the cast.

    Only 16-bit policies narrow parameters; a float64 model stays float64 under fp32. Buffers are not cast. Master
    weights are initialised from the returned values, by global name, since the cast loses their low bits.
    """
    formats, values = PrecisionDtypes.of(policy), {}
    for name, parameter in named_parameters(model).items():
        if policy.parameter not in HALF_DTYPES:
            formats = formats.at_least(parameter.dtype)
        values[name] = parameter.data
        parameter.data = parameter.data.to(formats.parameter)
    return formats, values
