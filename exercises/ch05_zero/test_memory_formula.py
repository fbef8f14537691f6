"""Tests of memory_formula: the reference allocates the tensors that a rank of the stage keeps, and counts bytes."""

import torch

from exercises.testing import expect, test
from minidist.config import PrecisionConfig, ZeroConfig
from minidist.precision.policy import resolve_policy
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
STAGES = {
    "stage 0": ZeroConfig(0),
    "stage 1": ZeroConfig(1),
    "stage 2": ZeroConfig(2),
    "stage 2, unsharded gradients": ZeroConfig(2, keep_gradients=True),
    "stage 3": ZeroConfig(3),
}
# (elements, moments per element) of each flat parameter; none of the lengths divides by 2, 3 or 4.
FLAT_PARAMS = ((101, 2), (7, 1), (1, 2), (25, 0))
# Rajbhandari et al. 2020, table 1: GB of 7.5e9 parameters, by the number of ranks.
PUBLISHED = {
    1: {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    2: {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    3: {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12},
}


def lengths(numel, ranks):
    """The padded length of a flat parameter and the length of its shard."""
    padded = numel
    while padded % ranks:
        padded += 1
    return padded, padded // ranks


def nbytes(numel, dtype):
    return 0 if dtype is None else torch.empty(numel, dtype=dtype, device="meta").nbytes


def expected_bytes(stage, policy, ranks):
    """Bytes of each kind on one rank, from tensors."""
    zero, total = STAGES[stage], dict.fromkeys(KINDS, 0)
    _, parameter, gradient, master, state = POLICIES[policy]
    for numel, moments in FLAT_PARAMS:
        padded, shard = lengths(numel, ranks if zero.stage else 1)
        unsharded_gradients = stage in ("stage 0", "stage 1", "stage 2, unsharded gradients")
        total["parameters"] += nbytes(shard if stage == "stage 3" else padded, parameter)
        total["gradients"] += nbytes(padded if unsharded_gradients else shard, gradient)
        total["masters"] += nbytes(shard, master)
        total["moments"] += moments * nbytes(shard, state)
    return total


def expect_bytes(answer, stage, policy, ranks, kinds=KINDS):
    """The bytes of each kind equal those of the tensors."""
    zero = STAGES[stage]
    sizes = [FlatParamSize(*lengths(numel, ranks if zero.stage else 1), moments) for numel, moments in FLAT_PARAMS]
    got = answer.model_states(sizes, zero, resolve_policy(POLICIES[policy][0]))
    for kind in kinds:
        elements = [numel for numel, _ in FLAT_PARAMS]
        case = f"{stage}, {ranks} rank{'s' * (ranks > 1)}, {policy}, flat parameters of {elements} elements"
        expect(f"bytes of {kind}", getattr(got, kind), expected_bytes(stage, policy, ranks)[kind], case=case)


@test(points=2)
def flat_params_are_padded(answer):
    """A flat parameter has as many equal shards as there are ranks, and no more padding than that needs."""
    for numel, ranks in ((12, 4), (13, 4), (16, 4), (1, 3), (0, 2), (5, 1), (3, 8), (10**18 + 1, 3)):
        padded = numel + (ranks - numel % ranks) % ranks
        got = answer.pad_to_shards(numel, ranks, 2)
        expect("(numel, shard_numel, moments)", [got.numel, got.shard_numel, got.moments], [padded, padded // ranks, 2])
    expect("moments", answer.pad_to_shards(5, 2, 0).moments, 0)


@test(points=3)
def each_stage_shards_its_states(answer):
    """Stage 0 shards nothing, stage 1 masters and moments, stage 2 also gradients, stage 3 also parameters."""
    for stage in STAGES:
        for ranks in (1, 2, 3, 4):
            expect_bytes(answer, stage, "fp16 throughout", ranks)


@test(points=3)
def every_dtype_counts(answer):
    """Parameter, gradient, master and moments have a dtype each; where parameters are masters there is no copy."""
    for policy in POLICIES:
        for stage in STAGES:
            expect_bytes(answer, stage, policy, 3)


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
            expected = expected_bytes("stage 1", "bf16", 2)[kind]
            expect(f"bytes of {kind}", getattr(got, kind), expected, case=f"sizes from {case}")
    expect("bytes of no flat parameters", answer.model_states([], STAGES["stage 1"], policy).total, 0)
