"""The dtypes of each precision policy, and the policies refused, with the one change that makes them valid."""

import itertools
import re
import subprocess
import sys
from dataclasses import astuple
from typing import get_args

import pytest
import torch

from minidist.config import Config, Dtype, PrecisionConfig
from minidist.errors import UserError
from minidist.precision.policy import PRECISION_BYTES, TORCH_NAMES, Policy, resolve_policy
from minidist.validation import validate
from tests.helpers.small_run import with_changes

# compute, parameter, accumulate, reduce, state, master, scaled
NAMED = {
    "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32", False),
    "fp64": ("fp64", "fp64", "fp64", "fp64", "fp64", "fp64", False),
    "bf16": ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32", False),
    "fp16": ("fp16", "fp16", "fp32", "fp32", "fp32", "fp32", True),
}


@pytest.mark.parametrize("name", NAMED)
def test_dtypes_of_each_named_policy(name):
    policy = resolve_policy(PrecisionConfig(policy=name))
    assert astuple(policy) == NAMED[name]
    assert policy.separate_masters == (name in ("bf16", "fp16"))


def test_all_named_policies_are_tested():
    assert set(NAMED) == set(get_args(PrecisionConfig.__annotations__["policy"])) == set(PRECISION_BYTES)


@pytest.mark.parametrize("name", get_args(Dtype))
def test_dtype_names_and_sizes_match_torch(name):
    assert getattr(torch, TORCH_NAMES[name]).itemsize == PRECISION_BYTES[name]


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"policy": "fp16", "grad_accum": "fp16"}, {"accumulate": "fp16", "reduce": "fp16"}),
        ({"policy": "bf16", "grad_accum": "bf16", "reduce": "fp32"}, {"accumulate": "bf16"}),
        ({"policy": "bf16", "reduce": "bf16"}, {"reduce": "bf16"}),
        ({"policy": "bf16", "reduce": "fp16"}, {"reduce": "fp16", "scaled": True}),
        ({"policy": "bf16", "master": "stochastic"}, {"master": None}),
        ({"policy": "bf16", "master": "fp64"}, {"master": "fp64", "state": "fp64"}),
        ({"policy": "fp32", "compute": "bf16"}, {"compute": "bf16", "parameter": "bf16"}),
        ({"policy": "fp32", "loss_scale": "dynamic"}, {"scaled": True}),
        ({"policy": "fp32", "master": "fp64"}, {"master": "fp64", "state": "fp64"}),
        ({"policy": "fp64", "grad_accum": "fp32"}, {"accumulate": "fp32", "reduce": "fp32"}),
    ],
)
def test_each_dtype_can_be_set_separately(given, changes):
    names = list(Policy.__dataclass_fields__)
    assert astuple(resolve_policy(PrecisionConfig(**given))) == tuple(
        changes.get(name, usual) for name, usual in zip(names, NAMED[given["policy"]], strict=True)
    )


@pytest.mark.parametrize(
    ("given", "separate"),
    [
        ({"policy": "bf16", "master": "stochastic"}, False),
        ({"policy": "fp32", "master": "fp64"}, True),
        ({"policy": "fp32", "compute": "bf16"}, True),
    ],
)
def test_masters_are_separate_where_their_dtype_differs(given, separate):
    assert resolve_policy(PrecisionConfig(**given)).separate_masters is separate


REFUSED = [
    (
        {"policy": "bf16", "parameter": "fp32"},
        "precision.compute is bf16 and precision.parameter fp32: .* precision.master (fp32). "
        "Give --precision.parameter bf16.",
        {"parameter": "bf16"},
    ),
    (
        {"compute": "fp16", "parameter": "fp64"},
        "precision.compute is fp16 and precision.parameter fp64: .* Give --precision.parameter fp16.",
        {"parameter": "fp16"},
    ),
    (
        {"policy": "fp16", "master": "stochastic"},
        "precision.master is stochastic and the parameters are fp16: .* Give --precision.policy bf16, or leave "
        "--precision.master out.",
        {"policy": "bf16"},
    ),
    (
        {"policy": "fp32", "master": "stochastic"},
        "precision.master is stochastic and the parameters are fp32: .* or leave --precision.master out.",
        {"master": None},
    ),
    (
        {"policy": "fp64", "master": "fp32"},
        "precision.master is fp32 and precision.parameter fp64: a master is as wide as its parameter. "
        "Give --precision.master fp64.",
        {"master": "fp64"},
    ),
    (
        {"policy": "fp32", "compute": "fp64"},
        "precision.master is fp32 and precision.parameter fp64: .* Give --precision.master fp64.",
        {"master": "fp64"},
    ),
    (
        {"policy": "fp16", "loss_scale": "none"},
        "precision.loss-scale is none, and gradients pass through fp16 (compute fp16, grad-accum fp32, reduce fp32), "
        ".* Give --precision.loss-scale dynamic, or leave it out.",
        {"loss_scale": "dynamic"},
    ),
    (
        {"policy": "bf16", "reduce": "fp16", "loss_scale": "none"},
        "gradients pass through fp16 (compute bf16, grad-accum fp32, reduce fp16), .* or leave it out.",
        {"loss_scale": "auto"},
    ),
    (
        {"policy": "fp32", "grad_accum": "fp16", "loss_scale": "none"},
        "gradients pass through fp16 (compute fp32, grad-accum fp16, reduce fp16), .* or leave it out.",
        {"loss_scale": "dynamic"},
    ),
]


@pytest.mark.parametrize(("given", "message", "change"), REFUSED)
def test_policies_that_cannot_train_are_refused_with_a_change_that_works(given, message, change):
    pattern = "".join(".*" if part == ".*" else re.escape(part) for part in re.split(r"(\.\*)", message))
    with pytest.raises(UserError, match=pattern + "$"):
        resolve_policy(PrecisionConfig(**given))
    resolve_policy(PrecisionConfig(**given | change))


def test_every_accepted_policy_is_sound():
    """Over all combinations: no gradient in fp16 without a scale, no master narrower than its parameter."""
    dtypes, accepted = (None, *get_args(Dtype)), 0
    masters = (None, "fp64", "fp32", "stochastic")
    for name, compute, accum, reduce, master in itertools.product(NAMED, dtypes, dtypes, dtypes, masters):
        for scale in ("auto", "dynamic", "none"):
            given = PrecisionConfig(name, compute, None, accum, reduce, master, scale)
            try:
                policy = resolve_policy(given)
            except UserError:
                continue
            accepted += 1
            assert policy.compute == policy.parameter
            assert policy.scaled or "fp16" not in (policy.compute, policy.accumulate, policy.reduce)
            assert policy.scaled <= (scale != "none")
            assert policy.master is None or PRECISION_BYTES[policy.master] >= PRECISION_BYTES[policy.parameter]
            assert policy.state == (policy.master or "fp32")
            assert policy.master is not None or policy.parameter == "bf16"
    assert accepted > 500


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e39, 1e-39])
def test_an_initial_scale_out_of_range_is_refused(scale):
    with pytest.raises(
        UserError, match=re.escape(f"precision.initial-scale is {scale}; it must be from 1e-30 to 1e+30")
    ):
        validate(with_changes(Config(), precision__initial_scale=scale), 1)


def test_a_policy_needs_no_torch():
    code = "import sys, minidist.precision.policy, minidist.precision.scaler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
