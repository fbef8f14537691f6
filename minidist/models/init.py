"""Initial values are a function of (seed, global name), so every layout starts from the same model."""

import hashlib
import math

import torch
from torch import Tensor, nn

from minidist.models.config import ModelConfig

# What compile and recomputation wrappers put into a name.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def initial_value(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> Tensor:
    """The whole initial value of one parameter, in float32 on the CPU. A sharded layout draws it whole, then cuts.

    name and shape are those of the unsplit model. Norms start at one; matrices are normal with `init_std`, those that
    write into the residual stream divided by `sqrt(2 * num_layers)` (GPT-2, Radford et al. 2019, section 2.3), so that
    the sum of all branches does not grow with depth.
    """
    # device="cpu" below, even when a default device is set: values must not depend on where the model lives.
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
    """Set every parameter of a whole model to its initial value, cast to the dtype and device the parameter has.

    A tied tensor is drawn once, under the name of the embedding. `model.config` gives the scales. Raises ValueError for
    a parameter on the meta device, which has nowhere to put a value: call `to_empty` first.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no values: call model.to_empty(device=...) first")
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        parameter.copy_(initial_value(name, tuple(parameter.shape), seed, model.config))
