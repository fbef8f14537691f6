"""A precision policy as torch dtypes, and the cast of a model to its parameter dtype."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from minidist.parameters import named_parameters
from minidist.precision.policy import HALF_DTYPES, TORCH_NAMES, Policy


@dataclass(frozen=True)
class PrecisionDtypes:
    """The torch dtype of each kind of tensor; fields as in `Policy`, where master is None with stochastic rounding."""

    parameter: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    state: torch.dtype
    master: torch.dtype | None

    @classmethod
    def from_policy(cls, policy: Policy) -> "PrecisionDtypes":
        """Return the torch dtypes of `policy`."""
        names = {f.name: getattr(policy, f.name) for f in fields(cls)}
        return cls(**{kind: name and getattr(torch, TORCH_NAMES[name]) for kind, name in names.items()})

    def promoted_to(self, dtype: torch.dtype) -> "PrecisionDtypes":
        """Return these dtypes, each promoted to at least `dtype`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return PrecisionDtypes(**{name: d if d is None else torch.promote_types(d, dtype) for name, d in own.items()})


def cast_parameters(model: nn.Module, policy: Policy) -> tuple[PrecisionDtypes, dict[str, Tensor]]:
    """Cast the model's parameters in place to the policy's dtype.

    Returns the dtype of each kind of tensor, and the parameters' values before the cast, by their names in the full
    model: master weights are initialised from these, since the cast loses low bits. Only 16-bit policies narrow
    parameters; a float64 model stays float64 under fp32. Buffers are not cast.
    """
    dtypes = PrecisionDtypes.from_policy(policy)
    values = {}
    for name, parameter in named_parameters(model).items():
        if policy.parameter not in HALF_DTYPES:
            dtypes = dtypes.promoted_to(parameter.dtype)
        values[name] = parameter.data
        parameter.data = parameter.data.to(dtypes.parameter)
    return dtypes, values
