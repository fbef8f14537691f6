"""Tests of memory_formula: the reference allocates the tensors that a rank of the stage keeps, and counts bytes."""

import functools
import itertools

import torch

from exercises.testing import expect, test
from minidist.config import PrecisionConfig, ZeroConfig
from minidist.precision.policy import Policy, resolve_policy
from minidist.tools.estimate.states import FlatParamSize

KINDS = ("parameters", "gradients", "masters", "moments")
# The dtypes of parameter, accumulated gradient, separate master weight (None: there is none) and moments.
POLICIES = {
    "fp32": (PrecisionConfig("fp32"), torch.float32, torch.float32, None, torch.float32),
    "fp64": (PrecisionConfig("fp64"), torch.float64, torch.float64, None, torch.float64),
    "bf16": (PrecisionConfig("bf16"), torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "fp16 throughout": (
        PrecisionConfig("fp16", grad_accum="fp16"), torch.float16, torch.float16, torch.float32, torch.float32,
    ),
    "bf16, reduced in bf16": (
        PrecisionConfig("bf16", reduce="bf16"), torch.bfloat16, torch.float32, torch.float32, torch.float32,
    ),
    "bf16, masters in fp64": (
        PrecisionConfig("bf16", master="fp64"), torch.bfloat16, torch.float32, torch.float64, torch.float64,
    ),
    "bf16 without masters": (
        PrecisionConfig("bf16", master="stochastic"), torch.bfloat16, torch.float32, None, torch.float32,
    ),
}  # fmt: skip
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
STAGES = {
    "stage 0": ZeroConfig(0),
    "stage 1": ZeroConfig(1),
    "stage 2": ZeroConfig(2),
    "stage 2, unsharded gradients": ZeroConfig(2, keep_gradients=True),
    "stage 3": ZeroConfig(3),
    "stage 3, keep_gradients=True": ZeroConfig(3, keep_gradients=True),
}
# (elements, moments per element) of each flat parameter; none of the lengths divides by 2, 3 or 4.
FLAT_PARAMS = ((101, 2), (7, 1), (1, 2), (25, 0))
LARGE_FLAT_PARAMS = ((10**17 + 3, 2), (10**17 + 1, 1))  # lengths that no float represents
# Rajbhandari et al. 2020, table 1: GB of 7.5e9 parameters, by the number of ranks.
PUBLISHED = {
    1: {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    2: {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    3: {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12},
}


def whole(number):
    """A whole number as an int, because `expect` rounds a large int that it compares with a float."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def lengths(numel, ranks):
    """The padded length of a flat parameter and the length of its shard."""
    padded = numel
    while padded % ranks:
        padded += 1
    return padded, padded // ranks


@functools.cache
def nbytes(numel, dtype):
    return 0 if dtype is None else torch.empty(numel, dtype=dtype, device="meta").nbytes


def expected_bytes(stage, dtypes, ranks, flat_params=FLAT_PARAMS):
    """Bytes of each kind on one rank, from tensors. dtypes: of parameter, gradient, separate master and moments."""
    zero, total = STAGES[stage], dict.fromkeys(KINDS, 0)
    parameter, gradient, master, state = dtypes
    for numel, moments in flat_params:
        padded, shard = lengths(numel, ranks if zero.stage else 1)
        unsharded_gradients = stage in ("stage 0", "stage 1", "stage 2, unsharded gradients")
        total["parameters"] += nbytes(shard if zero.stage == 3 else padded, parameter)
        total["gradients"] += nbytes(padded if unsharded_gradients else shard, gradient)
        total["masters"] += nbytes(shard, master)
        total["moments"] += moments * nbytes(shard, state)
    return total


def expect_bytes(answer, stage, policy, ranks, flat_params=FLAT_PARAMS):
    """The bytes of each kind equal those of the tensors. policy: a key of POLICIES."""
    config, *dtypes = POLICIES[policy]
    expect_bytes_of_dtypes(answer, stage, policy, resolve_policy(config), dtypes, ranks, flat_params)


def expect_bytes_of_dtypes(answer, stage, told, policy, dtypes, ranks, flat_params=FLAT_PARAMS):
    """The bytes of each kind equal those of tensors of these dtypes. told: the policy in words."""
    zero = STAGES[stage]
    sizes = [FlatParamSize(*lengths(numel, ranks if zero.stage else 1), moments) for numel, moments in flat_params]
    got, wanted = answer.model_states(sizes, zero, policy), expected_bytes(stage, dtypes, ranks, flat_params)
    elements = [numel for numel, _ in flat_params]
    case = f"{stage}, {ranks} rank{'s' * (ranks > 1)}, {told}, flat parameters of {elements} elements"
    for kind in KINDS:
        expect(f"bytes of {kind}", whole(getattr(got, kind)), wanted[kind], case=case)


@test(points=2)
def flat_params_are_padded(answer):
    """A flat parameter has as many equal shards as there are ranks, and no more padding than that needs."""
    for numel, ranks in ((12, 4), (13, 4), (16, 4), (1, 3), (0, 2), (5, 1), (3, 8), (10**18 + 1, 3)):
        padded = numel + (ranks - numel % ranks) % ranks
        got = answer.pad_to_shards(numel, ranks, 2)
        expect(
            "(numel, shard_numel, moments)",
            [whole(each) for each in (got.numel, got.shard_numel, got.moments)],
            [padded, padded // ranks, 2],
        )
    expect("moments", answer.pad_to_shards(5, 2, 0).moments, 0)


@test(points=3)
def each_stage_shards_its_states(answer):
    """Stage 0 shards nothing, stage 1 masters and moments, stage 2 also gradients, stage 3 also parameters."""
    for stage in STAGES:
        for ranks in (1, 2, 3, 4):
            expect_bytes(answer, stage, "fp16 throughout", ranks)
    for stage in STAGES:
        expect_bytes(answer, stage, "fp16 throughout", 3, LARGE_FLAT_PARAMS)


@test(points=3)
def every_dtype_counts(answer):
    """Parameter, gradient, master and moments have a dtype each; where parameters are masters there is no copy."""
    for policy in POLICIES:
        for stage in STAGES:
            expect_bytes(answer, stage, policy, 3)
    names = ("fp16", "bf16", "fp32"), ("fp16", "fp64"), (None, "fp16", "bf16", "fp32", "fp64"), ("bf16", "fp32", "fp64")
    for parameter, accumulate, master, state in itertools.product(*names):
        policy = Policy(parameter, parameter, accumulate, "fp32", state, master, scaled=False)
        told = f"parameter {parameter}, accumulate {accumulate}, reduce fp32, master {master}, state {state}"
        separate = master if master != parameter else None
        dtypes = [DTYPES[name] for name in (parameter, accumulate, separate, state)]
        for stage in ("stage 0", "stage 2", "stage 3"):
            expect_bytes_of_dtypes(answer, stage, told, policy, dtypes, 3)


@test(points=2)
def matches_the_published_figures(answer):
    """7.5e9 parameters in fp16 with Adam, on 1 to 1024 ranks: the figures of the ZeRO paper."""
    policy = resolve_policy(POLICIES["fp16 throughout"][0])
    for stage, by_ranks in PUBLISHED.items():
        for ranks, printed in by_ranks.items():
            size = answer.pad_to_shards(7_500_000_000, ranks, 2)
            gigabytes = answer.model_states([size], ZeroConfig(stage), policy).total / 1e9
            half_a_digit = 0.005 if printed < 2 else 0.05
            case = f"stage {stage} on {ranks} ranks"
            expect("GB of model states per rank", gigabytes, printed, case=case, tolerance=half_a_digit + 1e-6)


@test(points=2)
def accepts_a_generator(answer):
    """The sizes may come from a generator or another iterator, which yields each of them once; without any: 0."""
    policy = resolve_policy(PrecisionConfig("bf16"))
    sizes = [FlatParamSize(*lengths(numel, 2), moments) for numel, moments in FLAT_PARAMS]
    for case, given in (("a generator", (size for size in sizes)), ("an iterator, iter(list)", iter(sizes))):
        got = answer.model_states(given, STAGES["stage 1"], policy)
        for kind in KINDS:
            expected = expected_bytes("stage 1", POLICIES["bf16"][1:], 2)[kind]
            expect(f"bytes of {kind}", getattr(got, kind), expected, case=f"sizes from {case}")
    for stage, zero in STAGES.items():
        expect("bytes of no flat parameters", answer.model_states(iter(()), zero, policy).total, 0, case=stage)
