"""Parity: every row passes, the reference is independent of the package, and the command reports its results."""

import ast
import contextlib
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minidist.tools.parity.muon
import minidist.tools.parity.reference
from minidist.data.partition import block_partition
from minidist.errors import UserError
from minidist.models.dropout import DropoutAddress
from minidist.tools.parity import command
from minidist.tools.parity.cases import GLOBAL_BATCH, HALF, MODES, SEED, TOLERANCES
from minidist.tools.parity.command import (
    ParityOptions,
    choose_cases,
    describe_plan,
    format_result_row,
    main,
    parity_json,
)
from minidist.tools.parity.plan import list_cases, plan_cases
from minidist.tools.parity.run import run
from tests.helpers.exhaustive import exhaustive

KEYS = (
    *("layout", "dtype", "optimizer", "loss_diff", "grad_diff", "grad_norm_diff", "param_diff"),
    *("worst_tensor", "first_wrong", "tolerance", "ok"),
)
ROW = dict.fromkeys(KEYS, 0.0) | {"layout": "dp=2 bucketed tied", "dtype": "float64", "optimizer": "sgd"}
PASSING_ROW = ROW | {"first_wrong": None, "worst_tensor": "w", "tolerance": {"loss": 1e-10}, "ok": True}
# All combinations for 2 ranks, counted by hand. Common to all layouts: six switches of two values, and three kinds of
# recomputation. Per layout: micro-batches (two of the six pipeline schedules refuse a single one), optimizers, starts,
# shares, and the reductions of all dtypes: 2 for each of two dtypes (7 with cp=2, 8 with dp=2), fewer for 16 bits.
_COMMON = 2**6 * 3
_FAST = 2 * 3 * 6 + 2 * 3 * 28 * 4 + 2 * (2 * 3 * 2 * 6) + 2 * (2 * 3 * 2 * 26) + (4 * 2 + 2) * 3 * 2 * 6
# Synchronization modes, without clipping, resumption, recomputation and other optimizers than SGD, in two dtypes: four
# with dp=2, which has two starts and two kinds of shares, and one on a single rank.
_MODES = 2**4 * (4 * 2 * 2 * 2 * 2 + 2 * 2)
# The simple engine, with two optimizers and two kinds of recomputation: two reductions in two dtypes, one in 16 bits,
# and four ZeRO stages with dp=2 and cp=2. Layouts: one rank; dp=2; tp=2 and cp=2, twice each; pp=2 with gpipe and 1f1b
# and, without recomputation, with zb-h1. Then two modes with dp=2.
_WITH_ZERO, _WITHOUT = 2 * 6 + 2 * 5, 2 * 2 + 2 * 1
_SIMPLE = 2**6 * 2 * 2 * 2 * (_WITHOUT + 4 * _WITH_ZERO + 4 * _WITHOUT + 4 * _WITH_ZERO + 4 * _WITHOUT + _WITHOUT)
_SIMPLE_MODES = 2**4 * 2 * 2 * 2 * 2 * 2
# Its three all-reduce algorithms with dp=2 go with one value of each other switch.
ALL_COMBINATIONS = _COMMON * _FAST + _MODES + _SIMPLE + _SIMPLE_MODES + 3
COVERED = "the rows that run contain every pair of their values"
BAD = PASSING_ROW | {"first_wrong": "step 0 grad w", "grad_diff": math.inf, "ok": False}


@pytest.fixture(autouse=True)
def one_thread():
    """A model this small is slower on more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The rows


def cases_of(world):
    return [case for case in list_cases(plan_cases(world)) if case.world_size == world]


def assert_rows_are_ok(server, cases):
    outcomes = list(run(server, cases))
    assert [case for case, _ in outcomes] == cases
    for _, row in outcomes:
        assert tuple(row) == KEYS
        assert row["ok"] and row["first_wrong"] is None, row
        assert all(row[f"{kind}_diff"] <= limit for kind, limit in row["tolerance"].items())
        assert row["worst_tensor"]


@pytest.mark.deadline(1800)  # a hundred rows in one test
@pytest.mark.parametrize("world", [1, *exhaustive(2, 3)])
def test_every_row_equals_one_process(server, world):
    assert_rows_are_ok(server, cases_of(world))


@pytest.mark.parametrize("world, fewest_cases, fewest_layouts", [(2, 10, 3), (3, 14, 5)])
def test_every_layout_and_switch_equals_one_process(server, world, fewest_cases, fewest_layouts):
    """Each value once; all pairs of switch values on one rank are in `make test`, on more ranks in `make test-all`."""
    seen, cases = set(), []
    for case in cases_of(world):
        values = {(field.name, getattr(case, field.name)) for field in dataclasses.fields(case)}
        if values - seen:
            cases.append(case)
        seen |= values
    assert len(cases) > fewest_cases and len({case.mesh_layout for case in cases}) > fewest_layouts
    assert_rows_are_ok(server, cases)


@pytest.mark.exhaustive
def test_every_mesh_of_four_ranks_equals_one_process(server):
    """The first row of each mesh and choice of its axes; `minidist parity --ranks 4` runs all rows."""
    first = {
        (c.mesh_layout.mesh, c.mesh_layout.sequence, c.mesh_layout.context): c for c in reversed(plan_cases(4)[2].cases)
    }
    cases = sorted(first.values(), key=plan_cases(4)[2].cases.index)
    assert len(cases) > 14
    for _, row in run(server, cases):
        assert row["ok"], row


def test_the_synchronization_modes_are_compared_by_their_parameters(server):
    """Each mode has rows where it equals one process; a mode that does not is found, and what is not compared said."""
    cases = [case for world in (1, 2) for case in cases_of(world) if case.has_own_gradients]
    assert {case.gradients for case in cases} == {"local", "diloco", "gossip", "stale", "asynchronous"}
    assert all(set(case.tolerance) == {"param"} for case in cases)
    wrong = next(case for case in cases if case.gradients == "diloco")
    [(_, row)] = run(server, [wrong], prepare=halve_diloco)
    assert not row["ok"] and "param" in row["first_wrong"] and row["loss_diff"] is None
    assert " - " in format_result_row(row)[0]


def halve_diloco():
    """Another outer learning rate on the ranks, which no longer gives the mean of the replicas."""
    MODES["diloco"] = dataclasses.replace(MODES["diloco"], outer_lr=0.5)


def test_tolerances_are_pinned():
    everything = {"loss": 1e-10, "grad": 1e-10, "grad_norm": 1e-10, "param": 1e-10}
    rounded = {"loss": 2e-6, "grad": 1e-5, "grad_norm": 2e-6}
    assert TOLERANCES["float64", "adamw"] == TOLERANCES["float64", "sgd"] == everything
    assert TOLERANCES["float32", "sgd"] == rounded | {"param": 1e-5}
    assert TOLERANCES["float32", "adamw"] == rounded
    # In 16 bits the tolerance of a loss is half an eps of the dtype, that of a gradient 40 eps.
    assert TOLERANCES["bf16", "sgd"] == {"loss": 2**-9, "grad": 40 * 2**-8, "grad_norm": 2**-6}
    assert TOLERANCES["fp16", "adamw"] == {"loss": 2**-12, "grad": 40 * 2**-11, "grad_norm": 2**-9}


def fail_in_the_second_case(world, cases, folder, prepare):
    """Replaces `run_cases`: the second rank fails in the second case."""
    from minidist.tools.parity import ranks

    real, left = ranks.run_case, [1]

    def run_case(*args):
        if not left and world.rank == 1:
            raise RuntimeError("out of order")
        left.pop()
        return real(*args)

    ranks.run_case = run_case
    real_cases(world, cases, folder, prepare)


real_cases = command.run.__globals__["run_cases"]


def test_a_case_whose_ranks_fail_is_reported_and_the_others_still_run(server, monkeypatch):
    monkeypatch.setitem(command.run.__globals__, "run_cases", fail_in_the_second_case)
    cases = list(plan_cases(2)[1].cases[:4])
    outcomes = [outcome for _, outcome in run(server, cases)]
    assert [isinstance(outcome, dict) for outcome in outcomes] == [True, False, True, False]
    assert "rank 1 raised RuntimeError: out of order" in outcomes[1]


# The reference


@pytest.mark.parametrize("module", [minidist.tools.parity.reference, minidist.tools.parity.muon])
def test_the_reference_is_short_and_imports_only_torch_and_the_models(module):
    source = Path(module.__file__).read_text()
    assert len(source.splitlines()) <= 80
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.append(node.module)
        elif isinstance(node, ast.Name | ast.Attribute):
            assert getattr(node, "id", getattr(node, "attr", "")) not in ("__import__", "import_module", "modules")
    foreign = [
        name
        for name in modules
        if name.split(".")[0] not in {"torch"} | set(sys.stdlib_module_names) and not name.startswith("minidist.models")
    ]
    assert modules and foreign == []
    assert "importlib" not in modules


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_under_padding_a_mean_of_means_is_a_thousand_tolerances_off(tied, parts):
    expected = (True, tied, "float64")
    case = next(c for c in list_cases(plan_cases(1, full=True)) if (c.padding, c.tied, c.dtype) == expected)
    model, loader = case.make_model(), case.make_loader()
    batch = case.adjust_labels(0, loader.global_batch(0, GLOBAL_BATCH))

    def loss_of(rows):
        address = DropoutAddress(SEED, 0, batch.samples[rows], torch.arange(batch.tokens.shape[1]))
        return model(batch.tokens[rows], batch.labels[rows], address=address)

    sums, counts = zip(
        *(loss_of(torch.from_numpy(block_partition(GLOBAL_BATCH, parts, i))) for i in range(parts)), strict=True
    )
    right = sum(sums) / sum(counts)
    mean_of_means = sum(s / n for s, n in zip(sums, counts, strict=True)) / parts
    loosest = max(tolerance["loss"] for (dtype, _), tolerance in TOLERANCES.items() if dtype not in HALF)
    assert abs(right - mean_of_means).item() / right.item() > 1000 * loosest


# The command


def fake_outcomes(monkeypatch, *outcomes):
    """Make the command report these outcomes instead of running ranks."""
    monkeypatch.setattr(command, "RankServer", contextlib.nullcontext)
    monkeypatch.setattr(command, "run", lambda server, cases: zip(cases, outcomes, strict=False))
    monkeypatch.setattr(command, "list_cases", lambda parts: list_cases(parts)[: max(1, len(outcomes))])


@pytest.mark.parametrize(
    ("outcomes", "code", "last"),
    [
        ([PASSING_ROW, PASSING_ROW], 0, "2 of 2 rows equal one process ("),
        ([PASSING_ROW, BAD], 1, "1 of 2 rows equal one process; 1 differ ("),
        ([PASSING_ROW, "rank 1 died"], 1, "1 of 2 rows equal one process; 1 could not be run ("),
        ([], 1, "0 of 1 rows equal one process ("),
    ],
)
def test_the_exit_code_is_0_only_when_every_row_ran_and_is_ok(monkeypatch, capsys, tmp_path, outcomes, code, last):
    fake_outcomes(monkeypatch, *outcomes)
    assert main(ParityOptions(json=tmp_path / "rows.json")) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    found = json.loads((tmp_path / "rows.json").read_text())
    assert list(found) == ["rows", "not_run", "refused", "left_out"]
    assert {entry["what"]: entry["why"].split(":")[0] for entry in found["refused"]} == {
        "pp=2 interleaved micro-batches=1": "interleaved needs a number of micro-batches that is a multiple of the "
        "number of stages, and 1 is not a multiple of 2. Give 2 micro-batches, or choose 1f1b.",
        "pp=2 zb-h2 micro-batches=1": "zb-h2 needs 2 x 2 stages - 1 = 3 micro-batches in flight, but there are only 1",
    }
    assert len(found["rows"]) == sum(isinstance(outcome, dict) for outcome in outcomes)
    assert found["not_run"] == [
        {"what": list_cases(plan_cases(2))[i].name, "why": o} for i, o in enumerate(outcomes) if isinstance(o, str)
    ]
    left_out = f"{ALL_COMBINATIONS - max(1, len(outcomes))} more combinations of layouts and switches"
    assert found["left_out"] == [{"what": left_out, "why": COVERED}]


def test_an_infinite_difference_is_the_largest_number_that_json_has():
    (row,) = json.loads(parity_json([BAD], [], {}, {}), parse_constant=pytest.fail)["rows"]
    assert row == BAD | {"grad_diff": sys.float_info.max} and tuple(row) == KEYS


def test_a_wrong_row_says_what_is_wrong_first_and_a_row_that_did_not_run_says_why(monkeypatch, capsys):
    fake_outcomes(monkeypatch, BAD, "deadlock: ranks 0-1 wait\n  rank 0: in all_reduce")
    main(ParityOptions())
    out = capsys.readouterr().out
    assert "WRONG\n    wrong first: step 0 grad w\n" in out
    assert "NOT RUN:\n    deadlock: ranks 0-1 wait\n      rank 0: in all_reduce\n" in out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_the_table_fits_100_columns(ranks):
    cases = list_cases(plan_cases(ranks))
    options = ParityOptions(ranks=ranks)
    rows = [BAD | {"layout": case.description, "dtype": case.dtype, "optimizer": case.optimizer} for case in cases]
    lines = [line for row in rows for line in format_result_row(row)] + describe_plan(options, cases)
    assert max(map(len, lines)) <= 100


def test_the_plan_is_printed_with_its_rows_and_the_pairs_they_cover():
    cases = list_cases(plan_cases(2))
    text = "\n".join(describe_plan(ParityOptions(), cases))
    assert f"parity: {len(cases)} rows" in text
    rows = [
        re.search(rf"{part}: (\d+) rows{over}; (\d+) of the \2 pairs", text)
        for part, over in (("1 rank", ""), ("dp=2", ""), ("all other layouts of 2 ranks", " on 3 meshes"))
    ]
    assert all(rows) and sum(int(row[1]) for row in rows) == len(cases) > 100
    assert all(int(row[2]) > 300 for row in rows)
    assert "refused: pp=2 zb-h2 micro-batches=1: zb-h2 needs 2 x 2 stages - 1 = 3 micro-batches" in text


@pytest.mark.exhaustive
def test_the_full_product_is_described():
    options = ParityOptions(ranks=2, full=True)
    cases = choose_cases(options)
    met = [line.split("; ")[1] for line in describe_plan(options, cases) if " rows" in line and "pairs" in line]
    pairs = [re.fullmatch(r"(\d+) of the \1 pairs of switch values", each) for each in met]
    assert len(cases) > 100_000 and len(pairs) == 3 and all(pairs)


def test_only_takes_a_part_of_a_name_or_a_regular_expression():
    everything = choose_cases(ParityOptions())
    assert choose_cases(ParityOptions(only="dp=2 bucketed")) == [
        c for c in everything if c.name.startswith("dp=2 bucketed")
    ]
    expected = (2, "sgd")
    assert choose_cases(ParityOptions(only="dp=2.*sgd$")) == [
        c for c in everything if (c.mesh_layout.dp, c.optimizer) == expected
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ParityOptions(ranks=0), "--ranks is 0; parity needs at least 1 rank"),
        (ParityOptions(ranks=-3), "--ranks is -3"),
        (
            ParityOptions(only="dp=7"),
            f"--only 'dp=7' matches none of the {len(list_cases(plan_cases(2)))} rows of --ranks 2",
        ),
        (ParityOptions(only="("), "--only '(' is not a regular expression"),
        (ParityOptions(json=Path("/no/such/folder/rows.json")), "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_refused_with_the_numbers(options, message):
    with pytest.raises(UserError) as error:
        main(options)
    assert message in str(error.value)


def test_the_module_runs_as_a_command(tmp_path):
    file = tmp_path / "rows.json"
    name = list_cases(plan_cases(2))[-1].name
    command = [sys.executable, "-m", "minidist.tools.parity", "--ranks", "2", "--only", name, "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert f"{row['layout']} {row['dtype']} {row['optimizer']}" == name
