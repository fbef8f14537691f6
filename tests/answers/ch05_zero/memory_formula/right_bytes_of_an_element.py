"""First the bytes that an element of a whole row takes, and those of a shard; then both times their number."""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import BYTES as FORMAT_BYTES
from minidist.precision.policy import Policy
from minidist.tools.estimate.states import ModelStates, Row


def row_of(numel: int, shards: int, moments: int) -> Row:
    """So many elements, padded to as many equal shards."""
    shard, rest = divmod(numel, shards)
    shard += rest > 0
    return Row(numel=shards * shard, shard=shard, moments=moments)


def model_states(rows: Iterable[Row], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """What the rows take on each rank: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1.

    In bytes per element, with N shards: stage 0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2
    `p + (a + m + s)/N`, or as stage 1 with gradients kept whole; stage 3 `(p + a + m + s)/N`. p, a, m, s are those of
    parameter, accumulated gradient, master and all moments: with fp16 throughout and AdamW 2, 2, 4 and 8, sixteen.
    """
    found = [0, 0, 0, 0]
    for numel, shard, moments in rows:
        elements = [
            numel if zero.stage < 3 else shard,
            numel if zero.stage < 2 or zero.keep_gradients else shard,
            shard * policy.separate_masters,
            shard * moments,
        ]
        found = [total + more for total, more in zip(found, elements, strict=True)]
    formats = policy.parameter, policy.accumulate, policy.master or policy.state, policy.state
    return ModelStates(*(FORMAT_BYTES[name] * total for name, total in zip(formats, found, strict=True)))
