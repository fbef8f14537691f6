"""Model states by the formulas of ZeRO, against published figures and counting by hand."""

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.config import OptimConfig, PrecisionConfig, ZeroConfig
from minidist.precision.policy import resolve_policy
from minidist.tools.cli import main
from minidist.tools.estimate.states import FlatParamSize, model_states, moments_per_element, pad_to_shards

PUBLISHED = json.loads((Path(__file__).resolve().parents[1] / "published" / "zero_memory.json").read_text())
ROWS = [
    (stage, dp, printed)
    for stage in (1, 2, 3)
    for dp, printed in zip(PUBLISHED["dp"], PUBLISHED[f"stage{stage}"], strict=True)
]


def estimated(capsys, words: str) -> dict:
    assert main(["estimate", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def as_printed(number: float, like: float) -> Decimal:
    """Rounded half up to the digits of `like`."""
    return Decimal(str(number)).quantize(Decimal(str(like)), rounding=ROUND_HALF_UP)


@pytest.mark.parametrize(("stage", "dp", "printed"), ROWS)
def test_the_published_figures_to_the_printed_digit(capsys, stage, dp, printed):
    words = f"--parameters {PUBLISHED['parameters']} --mesh.dp {dp} --zero.stage {stage}"
    found = estimated(capsys, f"{words} --precision.policy fp16 --precision.grad_accum fp16")
    assert as_printed(found["model_state_bytes"] / 1e9, printed) == Decimal(str(printed))
    assert sum(found["model_states"].values()) == found["model_state_bytes"]


def test_the_baseline_of_the_paper_is_sixteen_bytes_a_parameter(capsys):
    found = estimated(capsys, "--parameters 7.5e9 --mesh.dp 64 --precision.policy fp16 --precision.grad_accum fp16")
    assert found["model_state_bytes"] == 120e9 and found["zero"] == {"stage": 0, "shards": 1}


# -- by hand ----------------------------------------------------------------------------------------------------------

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# What an element takes of (parameter, accumulation, master, moment), written down and not computed.
BY_POLICY = {
    ("fp32", None, None): (4, 4, 0, 4),
    ("fp64", None, None): (8, 8, 0, 8),
    ("bf16", None, None): (2, 4, 4, 4),
    ("fp16", None, None): (2, 4, 4, 4),
    ("fp16", "fp16", None): (2, 2, 4, 4),
    ("bf16", "bf16", None): (2, 2, 4, 4),
    ("bf16", None, "stochastic"): (2, 4, 0, 4),
    ("fp32", None, "fp64"): (4, 4, 8, 8),
    ("bf16", "fp32", "fp64"): (2, 4, 8, 8),
}
OPTIMIZERS = {"adamw": (OptimConfig(), 2), "sgd": (OptimConfig(kind="sgd"), 0)}
OPTIMIZERS["momentum"] = OptimConfig(kind="sgd", momentum=0.9), 1


def by_hand(n: int, shards: int, stage: int, keep: bool, sizes: tuple, moments: int) -> tuple[int, int, int, int]:
    """Bytes of one rank, counted by hand: (parameters, gradients, masters, moments)."""
    parameter, gradient, master, moment = sizes
    here = n
    while stage and here % shards:
        here += 1
    mine = here // shards if stage else here
    held = {"p": here, "g": here, "m": mine, "s": mine}
    if stage == 3:
        held["p"] = held["g"] = mine
    if stage == 2 and not keep:
        held["g"] = mine
    return held["p"] * parameter, held["g"] * gradient, held["m"] * master, held["s"] * moment * moments


@given(
    n=st.integers(1, 10**12),
    shards=st.integers(1, 2000),
    stage=st.sampled_from([0, 1, 2, 3]),
    keep=st.booleans(),
    precision=st.sampled_from(list(BY_POLICY)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    reduce=st.sampled_from([None, "bf16", "fp64"]),  # of messages, which are no model state
)
def test_bytes_of_any_model_match_counting_by_hand(n, shards, stage, keep, precision, optimizer, reduce):
    policy, accumulate, master = precision
    optim, moments = OPTIMIZERS[optimizer]
    flat_param = pad_to_shards(n, shards if stage else 1, moments_per_element(optim, hidden_matrix=False))
    given = PrecisionConfig(policy=policy, grad_accum=accumulate, reduce=reduce, master=master)
    found = model_states([flat_param], ZeroConfig(stage=stage, keep_gradients=keep), resolve_policy(given))
    expected = by_hand(n, shards, stage, keep, BY_POLICY[precision], moments)
    assert (found.parameters, found.gradients, found.masters, found.moments) == expected
    assert found.total == sum(expected)


def test_padding_is_shorter_than_the_number_of_shards():
    assert pad_to_shards(10, 4, 2) == pad_to_shards(12, 4, 2) == FlatParamSize(12, 3, 2)
    assert pad_to_shards(1, 8, 1) == FlatParamSize(8, 1, 1)


def test_each_flat_parameter_has_its_own_padding_and_moments():
    """Muon keeps one moment per matrix element, and two for other parameters."""
    muon = OptimConfig(kind="muon")
    assert (moments_per_element(muon, hidden_matrix=True), moments_per_element(muon, hidden_matrix=False)) == (1, 2)
    assert moments_per_element(OptimConfig(), hidden_matrix=True) == 2
    flat_params = [pad_to_shards(10, 4, 1), pad_to_shards(5, 4, 2)]
    found = model_states(flat_params, ZeroConfig(stage=3), resolve_policy(PrecisionConfig()))
    assert (found.parameters, found.gradients, found.masters, found.moments) == (20, 20, 0, 4 * (3 + 2 * 2))


# -- the command ------------------------------------------------------------------------------------------------------


def test_tp_and_pp_split_the_model_and_dp_and_cp_shard_it(capsys):
    found = estimated(capsys, "--parameters 1001 --mesh.dp 3 --mesh.cp 2 --mesh.tp 2 --mesh.pp 5 --zero.stage 3")
    assert found["world_size"] == 60 and found["mesh"] == {"pp": 5, "dp": 3, "cp": 2, "tp": 2}
    assert found["parameters"] == 1001 and found["local_parameters"] == 101  # of 100.1
    assert found["zero"] == {"stage": 3, "shards": 6} and found["padding"] == 1
    assert found["model_state_bytes"] == 17 * 16


def test_hybrid_sharding_has_fewer_shards(capsys):
    found = estimated(capsys, "--parameters 1000 --mesh.dp 8 --zero.stage 1 --zero.shard 4")
    assert found["zero"]["shards"] == 4 and found["model_state_bytes"] == 8 * 1000 + 250 * 8


def test_kept_gradients_are_unsharded(capsys):
    words = "--parameters 1000 --mesh.dp 4 --zero.stage 2"
    assert estimated(capsys, words)["model_states"]["gradients"] == 1000
    assert estimated(capsys, f"{words} --zero.keep_gradients")["model_states"]["gradients"] == 4000


def test_without_json_it_is_a_table(capsys):
    words = "--parameters 7.5e9 --mesh.dp 64 --zero.stage 3 --precision.policy fp16 --precision.grad_accum fp16"
    assert main(["estimate", *words.split()]) == 0
    table = capsys.readouterr().out
    assert table.startswith("64 ranks, mesh pp=1 x dp=64 x cp=1 x tp=1; 7,500,000,000 fp16 parameters\nZeRO stage 3: ")
    assert re.search(r"model states +1.88 GB\n", table) and re.search(r"masters +fp32 +469 MB\n", table)
    assert "--model options" in table and "host" not in table
    assert max(map(len, table.splitlines())) <= 120


def test_offloaded_states_are_said_to_be_elsewhere(capsys):
    assert (
        "host memory" in estimated(capsys, "--parameters 10 --zero.stage 1 --zero.offload --device cuda")["notes"][-1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parameters 0", "--parameters is 0; it must be a whole number of at least 1, such as 7.5e9."),
        ("--parameters -7e9", "--parameters is -7e+09; it must be a whole number"),
        ("--parameters 1.5", "--parameters is 1.5; it must be a whole number"),
        ("--parameters inf", "--parameters is inf; it must be a whole number"),
        ("--parameters nan", "--parameters is nan; it must be a whole number"),
        (
            "--parameters 7e9 --model.num-layers 3",
            "--parameters 7e+09 and the --model options both give the size of the model.",
        ),
        (
            "--parameters 10 --optim.kind muon",
            "optim.kind is muon, which keeps one moment per element of a layer's",
        ),
        ("--parameters 10 --precision.policy fp16 --precision.loss-scale none", "precision.loss-scale is none, and"),
        (
            "--parameters 10 --mesh.dp 6 --zero.stage 1 --zero.shard 4",
            "zero.shard is 4: dp=6 x cp=1 = 6 ranks cannot be divided into groups of 4 that hold complete sequences. "
            "Possible: --zero.shard 1 or 2 or 3 or 6.",
        ),
        ("--parameters 10 --mesh.dp 2 --zero.shard 2", "zero.shard is 2, but zero.stage 0 shards nothing"),
        ("--parameters 10 --mesh.cp 2 --mesh.dp 2 --zero.stage 1 --zero.shard 1", "Possible: --zero.shard 2 or 4."),
        ("--parameters 10 --block gpt", "estimates model states only, while --block gpt"),
        ("--parameters 10 --step-time-s 1 --peak-tflops 1", "leave --parameters out, or them."),
        ("--parameters 10 --zero.shard 0", "zero.shard is 0; it must be 1 or more"),
        ("--parameters 10 --mesh.tp 0", "mesh.tp is 0; a mesh axis is at least 1"),
        ("--parameters 10 --ranks 3 --mesh.tp 2", "the mesh pp=1 x dp=1 x cp=1 x tp=2 needs 2 ranks, the world has 3"),
    ],
)
def test_what_contradicts_is_refused(capsys, words, message):
    assert main(["estimate", *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""
