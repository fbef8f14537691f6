"""Sixteen bytes per parameter: the memory formula.

Compute the bytes of parameters, gradients, master weights and optimizer states on one rank, for every ZeRO stage. A
model is a list of flat parameters, each padded so that it has equal shards.

pad_to_shards(numel, shards, moments) returns FlatParamSize(numel, shard_numel, moments), with as little padding as
possible. model_states: zero.stage says what is sharded: 0 nothing, 1 masters and moments, 2 also gradients, 3 also
parameters. Stage 2 may keep gradients unsharded, stage 3 never does: zero.shards_gradients says whether a stage shards
them. policy has a dtype name for each kind of tensor: parameter, accumulate (of gradients in memory; reduce is
that of gradients in a message), master, and state (of moments). Returns ModelStates(parameters, gradients, masters,
moments). Without sharding a flat parameter's shard_numel is its numel.
Example: 10 elements on 4 ranks with 2 moments give FlatParamSize(12, 3, 2). In stage 1, with parameters and gradients
    in fp16, masters and moments in fp32, one such flat parameter takes 24, 24, 12 and 24 bytes.

Checked: padding; each stage; each policy, with and without separate masters; the figures of the ZeRO paper, table 1;
an iterable that can be read only once, and an empty one.

You may call:
    FlatParamSize(numel, shard_numel, moments), ModelStates(parameters, gradients, masters, moments)
    PRECISION_BYTES[name]   bytes of one number of a dtype; zero.shards_gradients   whether gradients are sharded
    policy.separate_masters   whether masters are a copy of their own; if not, they take no bytes

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
