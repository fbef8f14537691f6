"""Sixteen bytes per parameter: the memory formula.

Write the missing lines of pad_to_shards and model_states; their docstrings specify the results.
You may call: FlatParamSize, ModelStates, sum, PRECISION_BYTES, ZeroConfig.shards_gradients, Policy.separate_masters.
Check it with: python -m exercises check memory_formula

Stub a4e8f221.
"""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
from minidist.tools.estimate.states import FlatParamSize, ModelStates


def pad_to_shards(numel: int, shards: int, moments: int) -> FlatParamSize:
    """Return the size of a flat parameter of `numel` elements after padding it so that its `shards` shards are equal.

    moments: how many numbers the optimizer keeps per element.
    """
    raise NotImplementedError("return the flat parameter's length and its shard, padding included")


def model_states(flat_params: Iterable[FlatParamSize], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """Return the bytes of the model states on one rank, given its flat parameters, ZeRO stage and dtypes.

    flat_params: the sizes of the rank's flat parameters. policy: the dtype of each kind of tensor.

    Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1. In bytes per element, with N shards: stage
    0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2 `p + (a + m + s)/N`, or as stage 1 if gradients stay
    unsharded; stage 3 `(p + a + m + s)/N`. p, a, m and s are the bytes of a parameter, accumulated gradient, master
    weight and all moments: 2, 2, 4 and 8 with fp16 throughout and AdamW, together sixteen.
    """
    raise NotImplementedError("return the bytes of one rank: parameters, gradients, masters, moments")
