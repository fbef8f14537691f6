"""Tests of memory_formula: what is counted are the bytes of tensors, each made as a rank of the stage keeps it."""

import torch

from exercises.testing import expect, test
from minidist.config import PrecisionConfig, ZeroConfig
from minidist.precision.policy import resolve_policy
from minidist.tools.estimate.states import Row

KINDS = ("parameters", "gradients", "masters", "moments")
# Each with the dtypes of parameter, accumulated gradient, master of its own (None: there is none) and moments.
POLICIES = {
    "fp32": (PrecisionConfig("fp32"), torch.float32, torch.float32, None, torch.float32),
    "fp64": (PrecisionConfig("fp64"), torch.float64, torch.float64, None, torch.float64),
    "bf16": (PrecisionConfig("bf16"), torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "fp16 throughout": (
        PrecisionConfig("fp16", grad_accum="fp16"), torch.float16, torch.float16, torch.float32, torch.float32,
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
    "stage 2, whole gradients": ZeroConfig(2, keep_gradients=True),
    "stage 3": ZeroConfig(3),
}
# Elements of a row and what the optimizer keeps of each: none of the lengths divides by 2, 3 or 4.
ROWS = ((101, 2), (7, 1), (1, 2), (25, 0))
# Rajbhandari et al. 2020, table 1: GB of 7.5e9 parameters, by the number of ranks.
PUBLISHED = {
    1: {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    2: {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    3: {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12},
}


def lengths(numel, ranks):
    """Of the whole row and of a shard."""
    whole = numel
    while whole % ranks:
        whole += 1
    return whole, whole // ranks


def nbytes(numel, dtype):
    return 0 if dtype is None else torch.empty(numel, dtype=dtype, device="meta").nbytes


def kept(stage, policy, ranks):
    """Bytes of each kind on one rank, from tensors."""
    zero, total = STAGES[stage], dict.fromkeys(KINDS, 0)
    _, parameter, gradient, master, state = POLICIES[policy]
    for numel, moments in ROWS:
        whole, shard = lengths(numel, ranks if zero.stage else 1)
        gradients_whole = stage in ("stage 0", "stage 1", "stage 2, whole gradients")
        total["parameters"] += nbytes(shard if stage == "stage 3" else whole, parameter)
        total["gradients"] += nbytes(whole if gradients_whole else shard, gradient)
        total["masters"] += nbytes(shard, master)
        total["moments"] += moments * nbytes(shard, state)
    return total


def expect_kept(answer, stage, policy, ranks, kinds=KINDS):
    """Each kind of bytes is that of the tensors."""
    zero = STAGES[stage]
    rows = [Row(*lengths(numel, ranks if zero.stage else 1), moments) for numel, moments in ROWS]
    got = answer.model_states(rows, zero, resolve_policy(POLICIES[policy][0]))
    for kind in kinds:
        case = f"{stage}, {ranks} rank{'s' * (ranks > 1)}, {policy}, rows of {[numel for numel, _ in ROWS]} elements"
        expect(f"bytes of {kind}", getattr(got, kind), kept(stage, policy, ranks)[kind], case=case)


@test(points=2)
def rows_are_padded(answer):
    """A row is as many equal shards as there are ranks, and no longer than it must be."""
    for numel, ranks in ((12, 4), (13, 4), (16, 4), (1, 3), (0, 2), (5, 1), (3, 8), (10**18 + 1, 3)):
        whole = numel + (ranks - numel % ranks) % ranks
        row = answer.row_of(numel, ranks, 2)
        expect("(numel, shard, moments)", [row.numel, row.shard, row.moments], [whole, whole // ranks, 2])
    expect("moments", answer.row_of(5, 2, 0).moments, 0)


@test(points=3)
def what_each_stage_shares_out(answer):
    """Stage 1 the optimizer's part, stage 2 gradients too, stage 3 parameters too; stage 0 nothing."""
    for stage in STAGES:
        for ranks in (1, 2, 3, 4):
            expect_kept(answer, stage, "fp16 throughout", ranks)


@test(points=3)
def every_format_counts_as_it_is(answer):
    """Parameter, gradient, master and moments have a format each; where parameters are masters there is no copy."""
    for policy in POLICIES:
        for stage in STAGES:
            expect_kept(answer, stage, policy, 3)


@test(points=2)
def the_published_figures(answer):
    """7.5e9 parameters in fp16 with Adam, on 1 to 1024 ranks: the figures of the ZeRO paper."""
    policy = resolve_policy(POLICIES["fp16 throughout"][0])
    for stage, by_ranks in PUBLISHED.items():
        for ranks, printed in by_ranks.items():
            row = answer.row_of(7_500_000_000, ranks, 2)
            gigabytes = answer.model_states([row], ZeroConfig(stage), policy).total / 1e9
            half_a_digit = 0.005 if printed < 2 else 0.05
            case = f"stage {stage} on {ranks} ranks"
            expect("GB of model states per rank", gigabytes, printed, case=case, tolerance=half_a_digit + 1e-6)


@test(points=2)
def rows_come_one_by_one(answer):
    """The rows may come from a generator, which gives each of them once; without any, nothing is kept."""
    policy = resolve_policy(PrecisionConfig("bf16"))
    rows = [Row(*lengths(numel, 2), moments) for numel, moments in ROWS]
    got = answer.model_states((row for row in rows), STAGES["stage 1"], policy)
    for kind in KINDS:
        expect(f"bytes of {kind}", getattr(got, kind), kept("stage 1", "bf16", 2)[kind], case="rows from a generator")
    expect("bytes of no rows", answer.model_states([], STAGES["stage 1"], policy).total, 0)
