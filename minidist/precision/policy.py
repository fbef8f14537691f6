"""A precision policy: the dtype of each kind of tensor. Does not import torch, so that estimates can use it.

Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740, section 3): forward and backward in 16 bits, and a 32-bit
master copy of the weights for the update, which is often too small to change a 16-bit weight.
"""

from dataclasses import dataclass

from minidist.config import PrecisionConfig
from minidist.errors import UserError

# The dtypes of the options, with their names in torch and their sizes.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PRECISION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

HALF_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Policy:
    """The dtype of each kind of tensor, as a key of PRECISION_BYTES: "fp64", "fp32", "bf16" or "fp16".

    compute: activations and matrix products. parameter: the weights in forward and backward (and in ZeRO-3's
    all-gather). accumulate: gradients summed over micro-batches. reduce: gradients in the reduction over ranks.
    state: optimizer states. master: master weights; None with stochastic rounding, which needs none.
    scaled: whether the loss is scaled dynamically.
    """

    compute: str
    parameter: str
    accumulate: str
    reduce: str
    state: str
    master: str | None
    scaled: bool

    @property
    def uniform(self) -> bool:
        """Whether all dtypes are the same."""
        return {self.parameter, self.accumulate, self.reduce, self.state, self.master} == {self.compute}

    @property
    def separate_masters(self) -> bool:
        """Whether masters are a separate copy: there are masters, and their dtype is not the parameters'."""
        return self.master is not None and self.master != self.parameter


def resolve_policy(config: PrecisionConfig) -> Policy:
    """Return the policy of a configuration, with its defaults filled in. Raises UserError if it is invalid."""
    half = config.policy in HALF_DTYPES
    compute = config.compute or config.policy
    parameter = config.parameter or compute
    wide = "fp32" if half else config.policy
    accumulate = config.grad_accum or wide
    reduce = config.reduce or accumulate
    master = config.master or wide
    if compute != parameter:
        raise UserError(
            f"precision.compute is {compute} and precision.parameter {parameter}: the dtype of computation is that "
            f"of the parameters; the wider copy is precision.master ({master}). Give --precision.parameter {compute}."
        )
    if master == "stochastic" and parameter != "bf16":
        raise UserError(
            f"precision.master is stochastic and the parameters are {parameter}: this rounding is for bf16, which has "
            "the range of fp32. Give --precision.policy bf16, or leave --precision.master out."
        )
    if master != "stochastic" and PRECISION_BYTES[master] < PRECISION_BYTES[parameter]:
        raise UserError(
            f"precision.master is {master} and precision.parameter {parameter}: a master is as wide as its parameter. "
            f"Give --precision.master {parameter}."
        )
    scaled = config.loss_scale == "dynamic" or (config.loss_scale == "auto" and "fp16" in (compute, accumulate, reduce))
    if not scaled and "fp16" in (compute, accumulate, reduce):
        raise UserError(
            "precision.loss-scale is none, and gradients pass through fp16 "
            f"(compute {compute}, grad-accum {accumulate}, reduce {reduce}), "
            "whose smallest number is 6e-8: most of them would be 0. "
            "Give --precision.loss-scale dynamic, or leave it out."
        )
    state = "fp32" if master == "stochastic" else master
    return Policy(compute, parameter, accumulate, reduce, state, None if master == "stochastic" else master, scaled)
