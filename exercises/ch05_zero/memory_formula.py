"""Sixteen bytes per parameter: the memory formula.

Write the missing lines of row_of and model_states; its docstring specifies the result.
You may call: Row, ModelStates, sum, PRECISION_BYTES, ZeroConfig.shares_gradients, Policy.separate_masters.
Check it with: python -m exercises check memory_formula

Stub 0700500c.
"""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
from minidist.tools.estimate.states import ModelStates, Row


def row_of(numel: int, shards: int, moments: int) -> Row:
    """So many elements, padded to as many equal shards."""
    raise NotImplementedError("return the flat parameter's length and its shard, padding included")


def model_states(rows: Iterable[Row], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """What the rows take on each rank: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1.

    In bytes per element, with N shards: stage 0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2
    `p + (a + m + s)/N`, or as stage 1 with gradients kept whole; stage 3 `(p + a + m + s)/N`. p, a, m, s are those of
    parameter, accumulated gradient, master and all moments: with fp16 throughout and AdamW 2, 2, 4 and 8, sixteen.
    """
    raise NotImplementedError("return the bytes of one rank: parameters, gradients, masters, moments")
