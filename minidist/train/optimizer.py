"""The optimizer of a run: which rule, learning rate and weight decay hold for which parameter.

It updates *masters*: the parameters themselves, wider copies of them, or the slices of them that a rank holds. AdamW
and SGD treat every element by itself, so a slice gets what it would get in the whole: bit for bit where slices begin at
a multiple of `ALIGNED` elements of the parameter. Elsewhere the fused AdamW on CPU, whose vectors round once where its
single elements at the ends round twice, may differ in the last bit of the second moment. Muon needs whole matrices.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from minidist.config import OptimConfig
from minidist.parameters import Specs
from minidist.process_groups import is_hidden_matrix
from minidist.train.muon import Muon

ALIGNED = 64  # elements, of four bytes or more: whole vectors of every CPU that torch has kernels for


def make_optimizer(optim: OptimConfig, masters: Mapping[str, Tensor], specs: Specs) -> torch.optim.Optimizer:
    """torch's own AdamW or SGD, in its fused kernel where that is right, or Muon with AdamW.

    masters: by global name what is updated here, in any shape; possibly nothing. specs: their facts.
    Every group has `lr_ratio`, which `set_learning_rate` reads. Raises ValueError when Muon is given part of a matrix.
    """
    groups = _groups(optim, masters, specs)
    if optim.kind == "sgd":
        # The fused SGD raises for a parameter unused until now: it begins all momenta in the first step or none.
        made = torch.optim.SGD(groups, optim.lr, optim.momentum, fused=optim.momentum == 0)
    else:
        kind = Muon if optim.kind == "muon" else torch.optim.AdamW
        made = kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    set_learning_rate(made, optim.lr)
    return made


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its part of the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def _groups(optim: OptimConfig, masters: Mapping[str, Tensor], specs: Specs) -> list[dict]:
    """Masters that are treated alike, in their order. A rank without any has one empty group: it steps as others do."""
    hidden = {name for name in masters if optim.kind == "muon" and is_hidden_matrix(name, len(specs[name].shape))}
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
        groups.append(_muon_group(optim, {name: masters[name] for name in masters if name in hidden}, specs))
    return groups


def _of(masters: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [masters[name] for name in names]


def _muon_group(optim: OptimConfig, matrices: Mapping[str, Tensor], specs: Specs) -> dict:
    for name, master in matrices.items():
        if master.numel() != math.prod(specs[name].shape):
            raise ValueError(
                f"{name}: Muon needs the whole matrix {specs[name].shape}, and {master.numel()} elements of it are here"
            )
    return {
        "params": list(matrices.values()),
        "shapes": [specs[name].shape for name in matrices],
        "momentum": optim.muon_momentum,
        "steps": optim.muon_steps,
        "weight_decay": optim.weight_decay,
        "lr_ratio": optim.muon_lr_ratio,
    }
