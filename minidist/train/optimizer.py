"""The optimizer of a run: parameter groups with their update rule, learning rate and weight decay.

It updates *masters*: the parameters themselves, wider copies of them, or this rank's shards of them. AdamW and SGD are
elementwise, so updating shards is the same as updating the full parameter. With fused AdamW on CPU it is the same up to
rounding, as ZeRO's shards start at any element: the kernel rounds an element of the second moment once if it is part of
a full vector, and otherwise twice. Muon needs full matrices, and exchanges shards (`matrix_exchange`).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.config import OptimConfig
from minidist.parameters import ParamSpecs
from minidist.process_groups import is_hidden_matrix
from minidist.train.matrix_exchange import ShardedMatrices
from minidist.train.muon import Muon
from minidist.train.torch_optimizers import SGD, AdamW


def make_optimizer(
    optim: OptimConfig, masters: Mapping[str, Tensor], specs: ParamSpecs, matrix_group: Group | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer: torch's AdamW or SGD, fused where possible, or Muon with AdamW.

    masters: the tensors that this rank updates, by global name, in any shape; may be empty. specs: the parameters'
    specs. matrix_group: the ranks over which Muon's matrices are sharded; then the call is collective. Every parameter
    group has `lr_ratio`, which `set_learning_rate` reads. Raises ValueError if Muon gets a shard and no `matrix_group`.
    """
    matrices = [name for name in masters if optim.kind == "muon" and is_hidden_matrix(name, len(specs[name].shape))]
    groups = _adamw_groups(optim, {name: master for name, master in masters.items() if name not in matrices}, specs)
    if matrices:
        groups.append(_muon_group(optim, {name: masters[name] for name in matrices}, specs, matrix_group is not None))
    adamw = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
    match optim.kind:
        case "sgd":
            # Fused SGD with momentum raises for a parameter that gets its first gradient after the first step.
            made = SGD(groups, optim.lr, optim.momentum, fused=optim.momentum == 0)
        case "adamw":
            made = AdamW(groups, **adamw)
        case "muon":
            exchange = None
            if matrix_group is not None:
                dtype = next((master.dtype for master in masters.values()), None)
                exchange = ShardedMatrices({name: specs[name] for name in matrices}, matrix_group, dtype)
            made = Muon(groups, exchange, optim.muon_steps, **adamw)
    set_learning_rate(made, optim.lr)
    return made


def optimizer_state_names(kind: str, name: str, dims: int) -> tuple[str, ...]:
    """Return the names of the states that the optimizer keeps for a parameter; SGD without momentum keeps none.

    kind: as `OptimConfig.kind`. name, dims: the parameter's global name and its number of dimensions.
    """
    if kind == "sgd" or (kind == "muon" and is_hidden_matrix(name, dims)):
        return ("momentum_buffer",)
    return ("step", "exp_avg", "exp_avg_sq")


def set_learning_rate(optimizer: torch.optim.Optimizer, base_lr: float) -> None:
    """Set the learning rate of every parameter group to `base_lr` times its `lr_ratio`."""
    for group in optimizer.param_groups:
        group["lr"] = base_lr * group["lr_ratio"]


def _adamw_groups(optim: OptimConfig, masters: Mapping[str, Tensor], specs: ParamSpecs) -> list[dict]:
    """Return the parameter groups with and without weight decay; one empty group if there are no masters."""
    decayed = {name for name in masters if optim.decay == "all" or len(specs[name].shape) > 1}
    groups = []
    for is_decayed, decay in ((True, optim.weight_decay), (False, 0.0)):
        params = [master for name, master in masters.items() if (name in decayed) == is_decayed]
        if params or not groups:
            groups.append({"params": params, "weight_decay": decay, "lr_ratio": 1.0})
    return groups


def _muon_group(optim: OptimConfig, matrices: Mapping[str, Tensor], specs: ParamSpecs, sharded: bool) -> dict:
    """Return Muon's parameter group. sharded: whether `matrices` are shards; else ValueError for a partial matrix."""
    for name, master in matrices.items():
        if not sharded and master.numel() != math.prod(specs[name].shape):
            raise ValueError(
                f"{name}: Muon needs the whole matrix {specs[name].shape}, and {master.numel()} elements of it are here"
            )
    return {
        "params": list(matrices.values()),
        "shapes": [specs[name].shape for name in matrices],
        "names": list(matrices),
        "momentum": optim.muon_momentum,
        "steps": optim.muon_steps,
        "weight_decay": optim.weight_decay,
        "lr_ratio": optim.muon_lr_ratio,
    }
