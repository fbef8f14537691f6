"""Adds up what each row takes, one after the other."""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import BYTES as FORMAT_BYTES
from minidist.precision.policy import Policy
from minidist.tools.estimate.states import ModelStates, Row


def row_of(numel: int, shards: int, moments: int) -> Row:
    """So many elements, padded to as many equal shards."""
    rest = numel % shards
    padded = numel if rest == 0 else numel + shards - rest
    return Row(padded, padded // shards, moments)


def model_states(rows: Iterable[Row], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """What the rows take on each rank: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1.

    In bytes per element, with N shards: stage 0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2
    `p + (a + m + s)/N`, or as stage 1 with gradients kept whole; stage 3 `(p + a + m + s)/N`. p, a, m, s are those of
    parameter, accumulated gradient, master and all moments: with fp16 throughout and AdamW 2, 2, 4 and 8, sixteen.
    """
    parameters = gradients = masters = moments = 0
    for row in rows:
        parameters += FORMAT_BYTES[policy.parameter] * (row.shard if zero.stage > 2 else row.numel)
        gradients += FORMAT_BYTES[policy.accumulate] * (row.shard if zero.shares_gradients else row.numel)
        if policy.master not in (None, policy.parameter):
            masters += FORMAT_BYTES[policy.master] * row.shard
        moments += FORMAT_BYTES[policy.state] * row.shard * row.moments
    return ModelStates(parameters, gradients, masters, moments)
