"""The optimizer of a run: parameter groups with their update rule, learning rate and weight decay.

It updates *masters*: the parameters themselves, wider copies of them, or this rank's shards of them. AdamW and SGD are
elementwise, so updating a shard is bitwise the same as updating the full parameter if shards start at a multiple of
`ALIGNED` elements. Otherwise the second moment of fused AdamW on CPU may differ in its last bit, since the kernel
rounds vectorised elements once and the rest twice. Muon needs full matrices, and exchanges shards (`matrix_exchange`).
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.config import OptimConfig
from minidist.parameters import ParamSpecs
from minidist.process_groups import is_hidden_matrix
from minidist.train.matrix_exchange import ShardedMatrices
from minidist.train.muon import Muon

ALIGNED = 64  # elements of at least 4 bytes: a multiple of the vector length of all of torch's CPU kernels


def make_optimizer(
    optim: OptimConfig, masters: Mapping[str, Tensor], specs: ParamSpecs, matrix_group: Group | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer: torch's AdamW or SGD, fused where possible, or Muon with AdamW.

    masters: the tensors that this rank updates, by global name, in any shape; may be empty. specs: of the parameters.
    matrix_group: the ranks over which Muon's matrices are sharded; collective over it. Every parameter group has
    `lr_ratio`, which `set_learning_rate` reads. Raises ValueError if Muon gets a shard and no `matrix_group`.
    """
    groups = _groups(optim, masters, specs, matrix_group is not None)
    if optim.kind == "sgd":
        # Fused SGD with momentum raises for a parameter that gets its first gradient after the first step.
        made = torch.optim.SGD(groups, optim.lr, optim.momentum, fused=optim.momentum == 0)
    else:
        adamw = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
        if optim.kind == "adamw":
            made = torch.optim.AdamW(groups, **adamw)
        else:
            exchange = None if matrix_group is None else _exchange(masters, specs, matrix_group)
            made = Muon(groups, exchange, optim.muon_steps, **adamw)
    set_learning_rate(made, optim.lr)
    return made


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group: `lr` times its `lr_ratio`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def _hidden_matrices(masters: Mapping[str, Tensor], specs: ParamSpecs) -> list[str]:
    return [name for name in masters if is_hidden_matrix(name, len(specs[name].shape))]


def _exchange(masters: Mapping[str, Tensor], specs: ParamSpecs, group: Group) -> ShardedMatrices:
    dtype = next((master.dtype for master in masters.values()), None)
    return ShardedMatrices({name: specs[name] for name in _hidden_matrices(masters, specs)}, group, dtype)


def _groups(optim: OptimConfig, masters: Mapping[str, Tensor], specs: ParamSpecs, sharded: bool) -> list[dict]:
    """Return the parameter groups, each in the order of `masters`; one empty group if there are none."""
    hidden = set(_hidden_matrices(masters, specs)) if optim.kind == "muon" else set()
    decayed = {name for name in masters if optim.decay == "all" or len(specs[name].shape) > 1}
    rest = [name for name in masters if name not in hidden]
    groups = []
    for names, decay in (
        ([name for name in rest if name in decayed], optim.weight_decay),
        ([name for name in rest if name not in decayed], 0.0),
    ):
        if names or not groups:
            groups.append({"params": _of(masters, names), "weight_decay": decay, "lr_ratio": 1.0})
    if hidden:
        groups.append(_muon_group(optim, {name: masters[name] for name in masters if name in hidden}, specs, sharded))
    return groups


def _of(masters: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [masters[name] for name in names]


def _muon_group(optim: OptimConfig, matrices: Mapping[str, Tensor], specs: ParamSpecs, sharded: bool) -> dict:
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
