"""Initial parameter values as a function of (seed, global name), so that every layout starts from the same model."""

import hashlib
import math

import torch
from torch import Tensor, nn

from minidist.models.config import ModelConfig

# Prefixes that torch.compile and activation checkpointing wrappers add to parameter names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def initial_value(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> Tensor:
    """Return the full initial value of one parameter, float32 on the CPU; sharded layouts slice it.

    name, shape: the parameter's name and shape in the unsplit model. seed: the run's seed; the random numbers are a
    function of seed and name. config: the model's sizes and `init_std`. Norm weights are ones. Matrices are normal with
    standard deviation `init_std`, divided by `sqrt(2 * num_layers)` for those that write into the residual stream
    (GPT-2, Radford et al. 2019, section 2.3), so that the sum of all branches does not grow with depth.
    """
    # Explicitly on the CPU, even if a default device is set: values must not depend on the model's device.
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    std = config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.num_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * std


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int) -> None:
    """Set every parameter of an unsharded model to its initial value, in the parameter's own dtype and device.

    A tied tensor is initialised once, under the embedding's name. Raises ValueError for a parameter on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no values: call model.to_empty(device=...) first")
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        parameter.copy_(initial_value(name, tuple(parameter.shape), seed, model.config))
