"""Sixteen bytes per parameter: the memory formula: the solution, as it stands in minidist.tools.estimate.states.

Mixed precision with Adam takes sixteen bytes per parameter: two for the parameter, two for its gradient, four for its
master weight, eight for two moments. Twelve belong to the optimizer, which uses them once per step, so ZeRO shards
them first (Rajbhandari et al. 2020, table 1).

Each flat parameter is padded separately, so the sums are over flat parameters, not over the model: padding takes
memory too, and a formula in fractions of the model's total size misses it. An estimate is useful only if it equals
the measured bytes.

Usual wrong answers:
* a row that divides gets padding as well
* a float has no room for every whole number
* the package's own formula
* sixteen bytes, whatever the stage
* right for fp16 with sums in fp16, and every state four bytes
* gradients are added up in the format of the parameters
* gradients are sharded in stage 3 only
* stage 2 shards gradients although `keep_gradients` is set
* masters where the parameters are the masters
* every rank keeps the masters of the whole row
* the row as long as what lies in it, without its padding
* parameters are sharded in stage 2
* the shards are together shorter than what lies in them
* a generator is empty after the first sum over it
* as if all rows were as long as the first
* every rank keeps the moments of the whole row
* two moments for each element, whatever the optimizer keeps
* nothing takes any memory
"""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
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
        parameters=(part if zero.stage == 3 else whole) * PRECISION_BYTES[policy.parameter],
        gradients=(part if zero.shares_gradients else whole) * PRECISION_BYTES[policy.accumulate],
        masters=part * PRECISION_BYTES[policy.master] if policy.separate_masters else 0,
        moments=sum(row.shard * row.moments for row in rows) * PRECISION_BYTES[policy.state],
    )
