"""what_each_stage_shares_out: stage 2 shares out gradients that it was told to keep whole"""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import BYTES as FORMAT_BYTES
from minidist.precision.policy import Policy
from minidist.tools.estimate.states import ModelStates, Row


def row_of(numel: int, shards: int, moments: int) -> Row:
    """So many elements, padded to as many equal shards."""
    shard = -(-numel // shards)
    return Row(shard * shards, shard, moments)


def model_states(rows: Iterable[Row], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """What the rows take on each rank: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1.

    In bytes per element, with N shards: stage 0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2
    `p + (a + m + s)/N`, or as stage 1 with gradients kept whole; stage 3 `(p + a + m + s)/N`. p, a, m, s are those of
    parameter, accumulated gradient, master and all moments: with fp16 throughout and AdamW 2, 2, 4 and 8, sixteen.
    """
    rows = list(rows)
    whole, part = sum(row.numel for row in rows), sum(row.shard for row in rows)
    return ModelStates(
        parameters=(part if zero.stage == 3 else whole) * FORMAT_BYTES[policy.parameter],
        gradients=(part if zero.stage >= 2 else whole) * FORMAT_BYTES[policy.accumulate],
        masters=part * FORMAT_BYTES[policy.master] if policy.separate_masters else 0,
        moments=sum(row.shard * row.moments for row in rows) * FORMAT_BYTES[policy.state],
    )
