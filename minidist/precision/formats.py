"""A policy in torch's terms, and a model brought to the format that its policy computes in."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.precision.policy import TORCH_NAMES, Policy
from minidist.spec import named_parameters


@dataclass(frozen=True)
class Formats:
    """The dtype of each thing, as in `Policy`. master: None where updated parameters are rounded stochastically."""

    parameter: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    state: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, policy: Policy) -> "Formats":
        def dtype(name: str | None) -> torch.dtype | None:
            return None if name is None else getattr(torch, TORCH_NAMES[name])

        return cls(
            dtype(policy.parameter),
            dtype(policy.accumulate),
            dtype(policy.reduce),
            dtype(policy.state),
            dtype(policy.master),
        )

    @property
    def plain(self) -> bool:
        """Whether everything has one format."""
        return {self.parameter, self.accumulate, self.reduce, self.state, self.master} == {self.parameter}


def convert(model: nn.Module, formats: Formats) -> dict[str, Tensor]:
    """Bring every parameter of the model to the format of compute; returns the values they had, by global name.

    Masters are made from those: a rounded parameter has lost what its master is for. Buffers stay as they are.
    """
    values = {}
    for name, parameter in named_parameters(model).items():
        values[name] = parameter.data
        parameter.data = parameter.data.to(formats.parameter)
    return values
