"""Sixteen bytes per parameter: the memory formula: the solution, as it stands in minidist.tools.estimate.states.

Mixed precision with Adam takes sixteen bytes per parameter: two for the parameter, two for its gradient, four for its
master weight, eight for two moments. Twelve belong to the optimizer, which uses them once per step, so ZeRO shards
them first (Rajbhandari et al. 2020, table 1).

Each flat parameter is padded separately, so the sums are over flat parameters, not over the model: padding takes
memory too, and a formula in fractions of the model's total size misses it. An estimate is useful only if it equals
the measured bytes.

Usual wrong answers:
* adds padding although the length is divisible
* a float cannot represent every integer
* adds up the full lengths in floats, which cannot represent every integer
* the package's own formula
* sixteen bytes, whatever the stage
* right for fp16 with sums in fp16, and every state four bytes
* counts gradients in the dtype of their reduction, which may be narrower than that of their sums
* gradients are accumulated in the dtype of the parameters
* gradients are sharded in stage 3 only
* a generator is empty after the first sum over it
* stage 2 shards gradients although `keep_gradients` is set
* counts masters although the parameters are the masters
* every rank keeps the unsharded masters
* counts masters only if they have more bytes than the parameters; fp16 parameters may have masters in bf16
* copies generators only: any other iterator is empty after the first sum over it
* the flat parameter without its padding
* parameters are sharded in stage 2
* the shards together are shorter than the flat parameter
* as if all flat parameters were as long as the first
* leaves gradients unsharded in stage 3 as well if `keep_gradients` is set, which is an option of stage 2
* every rank keeps the unsharded moments
* two moments for each element, whatever the optimizer keeps
* nothing takes any memory
"""

from collections.abc import Iterable

from minidist.config import ZeroConfig
from minidist.precision.policy import PRECISION_BYTES, Policy
from minidist.tools.estimate.states import FlatParamSize, ModelStates


def pad_to_shards(numel: int, shards: int, moments: int) -> FlatParamSize:
    """Return the size of a flat parameter of `numel` elements after padding it so that its `shards` shards are equal.

    moments: how many numbers the optimizer keeps per element.
    """
    shard_numel = -(-numel // shards)
    return FlatParamSize(shard_numel * shards, shard_numel, moments)


def model_states(flat_params: Iterable[FlatParamSize], zero: ZeroConfig, policy: Policy) -> ModelStates:
    """Return the bytes of the model states on one rank, given its flat parameters, ZeRO stage and dtypes.

    flat_params: the sizes of the rank's flat parameters. policy: the dtype of each kind of tensor.

    Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 3 and table 1. In bytes per element, with N shards: stage
    0 `p + a + m + s`; stage 1 `p + a + (m + s)/N`; stage 2 `p + (a + m + s)/N`, or as stage 1 if gradients stay
    unsharded; stage 3 `(p + a + m + s)/N`. p, a, m and s are the bytes of a parameter, accumulated gradient, master
    weight and all moments: 2, 2, 4 and 8 with fp16 throughout and AdamW, together sixteen.
    """
    flat_params = list(flat_params)
    full, sharded = sum(flat.numel for flat in flat_params), sum(flat.shard_numel for flat in flat_params)
    return ModelStates(
        parameters=(sharded if zero.stage == 3 else full) * PRECISION_BYTES[policy.parameter],
        gradients=(sharded if zero.shards_gradients else full) * PRECISION_BYTES[policy.accumulate],
        masters=sharded * PRECISION_BYTES[policy.master] if policy.separate_masters else 0,
        moments=sum(flat.shard_numel * flat.moments for flat in flat_params) * PRECISION_BYTES[policy.state],
    )
