"""Mixed precision with fp32 masters on every rank, one process group, no unused parameters, and CPU random numbers.

LossScaler          the largest loss scale that does not overflow                  fast: scaler.py
MasterWeights       fp32 copies of 16-bit parameters, and how they are rounded     masters.py, rounding.py
step_or_skip        agree on an overflow before the first parameter is written     minidist/train/agree.py
with_recomputation  drop saved tensors in forward, and recompute them in backward  minidist/recompute.py
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.random import fork_rng

from minidist.comm import Group, all_reduce
from minidist.config import PrecisionConfig


class LossScaler:
    """The dynamic loss scale, for gradients that would underflow in fp16 (arXiv 1710.03740, section 3.2).

    config: `initial_scale` is a power of two, so scaling is exact; `growth_interval` and `max_overflows` count steps.
    scale: the factor of this step's loss. overflowed: the scales of the latest consecutive steps that overflowed,
    oldest first; empty if the last step did not overflow. exhausted: whether these are `max_overflows` steps or more.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale, self.overflowed, self._good_steps = float(config.initial_scale), [], 0
        self._interval, self._max_overflows = config.growth_interval, config.max_overflows

    @property
    def exhausted(self) -> bool:
        """Whether so many consecutive steps overflowed that the scale cannot be the cause."""
        return len(self.overflowed) >= self._max_overflows

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after `growth_interval` consecutive successful steps.

        Every change restarts the count of steps. At 2**127 the scale is not doubled, as fp32 has no 2**128, but the
        count restarts. overflow: whether a gradient on any rank was non-finite.
        """
        if overflow:
            self.overflowed.append(self.scale)
            self.scale, self._good_steps = self.scale / 2, 0
        else:
            self.overflowed, self._good_steps = [], self._good_steps + 1
        if self._good_steps == self._interval:
            self.scale, self._good_steps = min(self.scale * 2, 2.0**127), 0

    def state_dict(self) -> dict[str, Any]:
        """Return {"scale": float, "good_steps": int, "overflowed": list}, which determine all later steps."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict()` returned; it may have been written to JSON and read again."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 `values` to bf16, up or down at random, so that the expected result is the value (arXiv 1502.02551).

    Values that bf16 represents are unchanged, also infinities and NaN. generator: of the random numbers.
    """
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A bf16 number is the upper half of an fp32 number: the sum carries into it with just the right probability.
    upper = (values.view(torch.int32) + noise) & ~0xFFFF
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)


class MasterWeights:
    """The fp32 copies of 16-bit parameters, which the optimizer updates in their place (arXiv 1710.03740, section 3.1).

    parameters: 16-bit tensors of any shapes, which the model reads. values: their fp32 values before they were rounded,
    in the same order. generator: round stochastically, to bf16, with its numbers; None: round to nearest.
    masters: the fp32 copies, in the same order; they share no memory with `values`.
    """

    def __init__(
        self, parameters: Iterable[Tensor], values: Iterable[Tensor], generator: torch.Generator | None = None
    ):
        self.masters = [value.detach().clone() for value in values]
        self._parameters, self._generator = list(parameters), generator

    def attach_grads(self, gradients: Iterable[Tensor], scale: float = 1.0) -> None:
        """Set the `.grad` of each master to its gradient, converted to fp32 and then divided by `scale`."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(torch.float32) / scale

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Overwrite the parameters with the rounded masters; the masters keep their values."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.copy_(master if self._generator is None else round_stochastically(master, self._generator))


def step_or_skip(
    masters: MasterWeights, gradients: Sequence[Tensor], optimizer: Optimizer, scaler: LossScaler, group: Group
) -> bool:
    """Collective: update masters and parameters on all ranks of `group`, or on none; return whether they were updated.

    gradients: of the masters, in order, times `scaler.scale`, summed over the ranks. Ranks may hold different masters,
    such as shards. optimizer: of the masters. One all-reduce of one fp32 number, the largest of the ranks' overflow
    flags, comes before any change; each rank's scaler then learns the result.
    """
    is_finite = all(gradient.isfinite().all() for gradient in gradients)
    overflow = torch.tensor(0.0 if is_finite else 1.0, device=group.world.control_device)
    all_reduce(overflow, group, "max")
    scale, skip = scaler.scale, bool(overflow)
    scaler.update(skip)
    if not skip:
        masters.attach_grads(gradients, scale)
        optimizer.step()
        optimizer.zero_grad()
        masters.copy_to_params()
    return not skip


def with_recomputation(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that autograd saves only its arguments, and backward recomputes all other saved tensors.

    run: takes tensors and other arguments by position, and returns tensors. Returns a function with the same arguments
    and results. Backward calls `run` once more, from the CPU random state that forward began with, and leaves the
    current random state unchanged. Under `no_grad` the function only calls `run`.
    """

    def call(*args):
        if not torch.is_grad_enabled():
            return run(*args)
        state, indices, saved = torch.get_rng_state(), count(), {}  # saved: recomputed tensors by index

        def unpack(index: int) -> Tensor:
            if index not in saved:  # the first tensor that backward needs, or a second backward
                found: list[Tensor] = []
                inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
                with fork_rng(devices=[]), torch.enable_grad():
                    torch.set_rng_state(state)
                    with saved_tensors_hooks(lambda x: found.append(x.detach()), found.pop):
                        run(*inputs)
                saved.update(enumerate(found))
            return saved.pop(index)  # freed once the operation that needs it has done its backward

        with saved_tensors_hooks(lambda _: next(indices), unpack):
            return run(*args)

    return call
