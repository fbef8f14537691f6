"""Muon: the update of a matrix is its momentum, orthogonalised so that all singular values are near 1.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". As in Liu et al. 2025 (arXiv 2502.16982,
section 2.2), the update is scaled to the root mean square of AdamW's updates, so that both can use the same learning
rate and weight decay.
"""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from minidist.train.matrix_exchange import ShardedMatrices
from minidist.train.torch_optimizers import AdamW

# Of the polynomial a x + b x^3 + c x^5, chosen by Jordan et al. for its slope at 0: five iterations take singular
# values above about 0.002 to between 0.7 and 1.2, which is close enough to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2


class Muon(AdamW):
    """An optimizer that updates parameter groups with the key "shapes" by Muon, and all others by AdamW.

    groups: parameter groups as in torch. Muon's also have "shapes" (of the full matrices, as a parameter may be flat),
    "momentum", and "steps" (Newton-Schulz iterations) or, if matrices are sharded, "names". exchange: applies a
    function to full matrices that are sharded over ranks; None if none is. steps: Newton-Schulz iterations for sharded
    matrices. adamw: AdamW's arguments. The momentum is sharded like the parameters.
    """

    def __init__(self, groups: Iterable[dict], exchange: ShardedMatrices | None = None, steps: int = 5, **adamw):
        groups = list(groups)
        self._exchange = exchange
        self._steps = steps
        super().__init__([{"shapes": None, **group} for group in groups], **adamw)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_exchange": self._exchange, "_steps": self._steps}

    def __setstate__(self, state: dict) -> None:
        # AdamW's would expect a step count in every state, in order to upgrade states of old releases.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None, matrices_to_update: Collection[str] = ()) -> None:
        """Update every parameter that has a gradient; gradients are not modified.

        closure: as in torch. matrices_to_update: names of the matrices that at least one rank updates in this call, and
        possibly of other parameters, which are ignored. Only needed if matrices are sharded: then the call is
        collective, and a rank that holds no element of a matrix must call it too.
        """
        groups = self.param_groups
        muon = [group for group in groups if group["shapes"] is not None]
        if self._exchange is not None:
            self._step_sharded(muon[0] if muon else None, matrices_to_update)
        else:
            for group in muon:
                self._step_matrices(group)
        try:
            self.param_groups = [group for group in groups if group["shapes"] is None]
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict) -> None:
        """Update the matrices of a parameter group, which this rank holds in full."""
        for parameter, shape in zip(group["params"], group["shapes"], strict=True):
            if parameter.grad is not None:
                momentum = self._update_momentum(parameter, group["momentum"])
                _apply_update(parameter, orthogonalize(momentum.view(shape), group["steps"]), shape, group)

    def _step_sharded(self, group: dict | None, matrices_to_update: Collection[str]) -> None:
        """Collective: update the sharded matrices. group: None on a rank that holds no element of any matrix."""
        group = {"names": [], "params": [], "shapes": []} if group is None else group
        found = zip(group["names"], group["params"], group["shapes"], strict=True)
        held = {name: (shard, shape) for name, shard, shape in found if shard.grad is not None}
        momenta = {
            name: self._update_momentum(shard, group["momentum"]).reshape(-1) for name, (shard, _) in held.items()
        }
        updates = self._exchange.apply(lambda matrix: orthogonalize(matrix, self._steps), momenta, matrices_to_update)
        for name, (shard, shape) in held.items():
            _apply_update(shard, updates[name], shape, group)

    def _update_momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the momentum of a parameter and return Nesterov's look-ahead, in its shape."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def _apply_update(parameter: Tensor, update: Tensor, shape: tuple[int, int], group: dict) -> None:
    """Decay the weights, then subtract the update. shape: of the full matrix."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(update.to(parameter.device).view_as(parameter), alpha=group["lr"] * adamw_rms_scale(shape))


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return an approximately orthogonal matrix (m, n) with the singular vectors of `matrix`, in its dtype.

    steps: Newton-Schulz iterations, which bring all singular values near 1. The matrix is first divided by its norm,
    which bounds them by 1, so that the iteration converges.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T  # so that the Gram matrix has the smaller size
    x = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


def adamw_rms_scale(shape: tuple[int, int]) -> float:
    """Return the factor that gives an orthogonal matrix of this shape the root mean square of AdamW's updates."""
    return _RMS_OF_ADAMW * math.sqrt(max(shape))
