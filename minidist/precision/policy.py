"""A precision policy: which number format each thing has. Needs no torch, so that an estimate can read it.

Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740, section 3): forward and backward in 16 bits, a master copy
of the weights in 32 bits for the update, because an update is often smaller than half a 16-bit step of its weight.
"""

from dataclasses import dataclass

from minidist.config import PrecisionConfig
from minidist.errors import UserError

# What an option calls a format, and what torch does.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PRECISION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

HALF_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Policy:
    """The format of each thing, as keys of BYTES.

    compute: activations and products. parameter: what forward and backward read, and stage 3 gathers. accumulate: sums
    of gradients on a rank. reduce: gradients between ranks. state: the optimizer's states. master: the copy that the
    optimizer updates, None without one, when updated parameters are rounded stochastically.
    scaled: whether the loss is scaled.
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
        """Whether everything has one format."""
        return {self.parameter, self.accumulate, self.reduce, self.state, self.master} == {self.compute}

    @property
    def separate_masters(self) -> bool:
        """Whether masters are a copy of their own: not where the parameters have their format already."""
        return self.master is not None and self.master != self.parameter


def resolve_policy(config: PrecisionConfig) -> Policy:
    """The policy that a configuration means. Raises UserError for one that cannot train."""
    half = config.policy in HALF_DTYPES
    compute = config.compute or config.policy
    parameter = config.parameter or compute
    wide = "fp32" if half else config.policy
    accumulate = config.grad_accum or wide
    reduce = config.reduce or accumulate
    master = config.master or wide
    if compute != parameter:
        raise UserError(
            f"precision.compute is {compute} and precision.parameter {parameter}: what is computed with has the format "
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
