"""`minidist estimate`: its output, its refusals, FLOPs and the pipeline bubble."""

import json
import re
import subprocess
import sys

import pytest

from minidist.config import Config, DataConfig, MeshConfig, ParallelConfig, TrainConfig
from minidist.models.config import ModelConfig
from minidist.tools.cli import main
from minidist.tools.estimate.estimate import estimate
from minidist.tools.estimate.flops import flops_per_token
from minidist.tools.estimate.table import format_si


def said(capsys, words) -> str:
    assert main(["estimate", *words.split()]) == 0
    return capsys.readouterr().out


def test_json_has_the_costs_of_a_step_for_every_rank(capsys):
    found = json.loads(said(capsys, "--ranks 8 --mesh.pp 2 --mesh.tp 2 --train.micro-batches 4 --json"))
    assert (found["world_size"], found["mesh"]) == (8, {"pp": 2, "dp": 2, "cp": 1, "tp": 2})
    assert found["parameters"] == ModelConfig().num_parameters()
    assert found["flops_per_step"] == found["flops_per_token"] * 32 * 128 == found["flops_per_token"] * 4096
    assert found["stages"] == [[[0, 2]], [[2, 4]]] and found["pipeline"]["peak_live"] == [2, 1]
    assert [rank["coords"]["pp"] for rank in found["ranks"]] == [0] * 4 + [1] * 4
    for rank in found["ranks"]:
        of = {name.removesuffix("_bytes"): value for name, value in rank.items() if name.endswith("_bytes")}
        states = of["parameter"] + of["gradient"] + of["master"] + of["optimizer"]
        assert states == of["model_state"] > 0 and of["peak_memory"] == sum(rank["peak_breakdown"].values())
        assert states < of["peak_memory"] <= states + of["activation"] + of["buffer"]
        assert list(rank["peak_breakdown"]) == [
            "parameters",
            "gradients",
            "masters",
            "states",
            "activations",
            "buffers",
        ]
    gate = next(tensor for tensor in found["layer_saved_tensors"] if tensor["name"] == "gate")
    assert (gate["formula"], gate["shape"], gate["bytes"]) == ("b s/cp f/tp", [4, 128, 192], 4 * 4 * 128 * 192)
    assert any("Not included" in note for note in found["notes"])


def test_the_table_has_a_column_for_each_stage_and_says_what_is_not_in_it(capsys):
    table = said(capsys, "--ranks 8 --mesh.pp 8 --train.micro-batches 8 --model.num-layers 8")
    assert table.startswith("8 ranks, mesh pp=8 x dp=1 x cp=1 x tp=1; ")
    assert all(f"stage {stage}" in table for stage in range(8)) and table.count("\npeak memory ") == 2
    assert "pipeline: 1f1b, bubble 0." in table and "by stage: 8 7 6 5 4 3 2 1" in table
    assert "\npeak memory: " in table and "Not included" in table
    assert max(map(len, table.splitlines())) <= 120


def test_one_rank_sends_nothing(capsys):
    table = said(capsys, "--ranks 1")
    assert (
        "each rank" in table
        and "pipeline:" not in table
        and re.search(r"sent per step +0 B\nk, M", table.replace("\n\n", "\n"))
    )


def test_ranks_are_those_that_train_would_start(capsys):
    assert said(capsys, "--device cpu").startswith("2 ranks, mesh pp=1 x dp=2 ")
    assert said(capsys, "--mesh.dp 3 --mesh.tp 2").startswith("6 ranks, mesh pp=1 x dp=3 x cp=1 x tp=2")


def test_options_come_from_a_file_too(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = 6\n[mesh]\ntp = 2\n")
    found = json.loads(said(capsys, f"--config {file} --model.num-layers 5 --ranks 2 --json"))
    assert found["mesh"]["tp"] == 2 and found["stages"] == [[[0, 5]]]


REFUSED = [
    "--ranks 0",
    "--ranks 3 --mesh.pp 2",
    "--ranks 8 --mesh.pp 8 --train.micro-batches 8",
    "--ranks 4 --mesh.pp 2 --parallel.schedule zb-h2 --train.micro-batches 2",
    "--ranks 3 --mesh.tp 3",
    "--ranks 3 --mesh.cp 3",
    "--ranks 2 --model.num-heads 3",
    "--ranks 2 --train.global-batch 1",
    "--ranks 2 --optim.lr -1",
    "--ranks 2 --data.shares 1 2 3",
]


@pytest.mark.parametrize("words", REFUSED)
def test_invalid_configurations_are_refused_as_by_train(capsys, words):
    output = []
    for command in ("estimate", "train"):
        assert main([command, "--device", "cpu", *words.split()]) == 2
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1
        output.append(err)
    assert output[0] == output[1]


def test_a_transfer_takes_no_negative_time(capsys):
    assert main(["estimate", "--ranks", "2", "--mesh.pp", "2", "--train.micro-batches", "2", "--t-comm", "-1"]) == 2
    assert "t-comm is -1.0; it must be 0 or more" in capsys.readouterr().err


def test_it_starts_without_torch():
    program = (
        "import sys; from minidist.tools.cli import main; "
        "main(['estimate', '--json', '--device', 'cpu', '--mesh.tp', '2']); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["world_size"] == 2


def piped(schedule="1f1b", layers=7, tied=True, micro_batches=4, seq_len=32, pp=2, **model) -> Config:
    return Config(
        model=ModelConfig(num_layers=layers, tie_embeddings=tied, **model),
        mesh=MeshConfig(pp=pp, dp=1),
        parallel=ParallelConfig(schedule=schedule),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(global_batch=13, micro_batches=micro_batches),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_flops_of_the_stages_add_up_to_those_of_the_model(schedule, tied):
    config = piped(schedule, tied=tied)
    found = estimate(config, 2)
    assert sum(rank.flops for rank in found.ranks) == flops_per_token(config.model, 32) * 13 * 32
    assert found.ranks[0].flops != found.ranks[1].flops


def test_flops_are_divided_over_dp_tp_and_cp_ranks():
    config = Config(mesh=MeshConfig(dp=2, cp=2, tp=2), train=TrainConfig(global_batch=9))
    found = estimate(config, 8)
    assert sum(rank.flops for rank in found.ranks) == flops_per_token(config.model, 128) * 9 * 128
    assert [rank.samples for rank in found.ranks] == [5] * 4 + [4] * 4


def test_the_bubble_of_equal_stages_is_that_of_the_papers():
    # 4 layers on 4 stages, a head too small to count, no attention to speak of: every F, B and W takes the same time.
    # 1F1B: 3 (p - 1) of 3 (m + p - 1). ZB-H1: p - 1 of 3 m + p - 1 (Qi et al. 2023, table 2, with F = B = W).
    even = {"layers": 4, "vocab_size": 1, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 8192, "seq_len": 1}
    for schedule, bubble in (("gpipe", 3 / 11), ("1f1b", 3 / 11), ("zb-h1", 3 / 27)):
        found = estimate(piped(schedule, micro_batches=8, pp=4, **even), 4)
        assert found.pipeline.bubble == pytest.approx(bubble, abs=1e-3), schedule


def test_stage_times_include_the_head_and_attention_has_no_weight_gradient():
    # One layer and one layer with a head, in FLOPs a token forward: weights w, attention a, head v.
    h, kv, f, s, v = 128, 64, 384, 1024, 4096
    w, a, head = 2 * (2 * h * h + 2 * h * kv + 3 * h * f), 4 * h * s, 2 * h * v
    config = piped("zb-h1", layers=2, micro_batches=2, seq_len=s, vocab_size=v)
    found = estimate(config, 2).pipeline
    first, last = 3 * (w + a), 3 * (w + a + head)
    assert found.busy_times == pytest.approx([2 * first / (w + a + head), 2 * last / (w + a + head)])
    weight_half = next(span for span in found.spans[1] if span.action.kind == "W")
    assert weight_half.end - weight_half.start == pytest.approx((w + head) / (w + a + head))


def test_recomputation_counts_in_hardware_flops_only(capsys):
    none, block = (json.loads(said(capsys, f"--ranks 2 --recompute {how} --json")) for how in ("none", "block"))
    assert none["hardware_flops_per_step"] == none["flops_per_step"] == block["flops_per_step"]
    assert block["hardware_flops_per_step"] == sum(rank["hardware_flops"] for rank in block["ranks"])
    model = ModelConfig()
    layer = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 2 * 128 * 384) + 4 * 128 * 128  # without the last projection
    assert block["hardware_flops_per_step"] - block["flops_per_step"] == 4096 * model.num_layers * layer
    assert [tensor["name"] for tensor in block["layer_saved_tensors"]] == ["input of layer"]
    table = said(capsys, "--ranks 2 --recompute block")
    assert "with recomputation" in table and "\n  with recomputation" in table and "forward of every layer" in table


def test_utilisation_of_a_measured_step(capsys):
    measured = "--ranks 2 --recompute block --step-time-s 0.5 --peak-tflops 0.25"
    found = json.loads(said(capsys, f"{measured} --json"))
    for name, flops in (("mfu", found["flops_per_step"]), ("hfu", found["hardware_flops_per_step"])):
        assert found[name] == pytest.approx(flops / (0.5 * 2 * 0.25e12))
    assert f"MFU {100 * found['mfu']:.2f} %, HFU {100 * found['hfu']:.2f} %" in said(capsys, measured)


@pytest.mark.parametrize(
    "words, output",
    [
        ("--step-time-s 1", "also give --peak-tflops"),
        ("--peak-tflops 312", "also give --step-time-s"),
        ("--step-time-s 0 --peak-tflops 312", "step-time-s is 0.0; it must be above 0"),
        ("--step-time-s 1 --peak-tflops nan", "peak-tflops is nan; it must be above 0"),
    ],
)
def test_utilisation_needs_step_time_and_peak_flops(capsys, words, output):
    assert main(["estimate", "--ranks", "1", *words.split()]) == 2
    assert output in capsys.readouterr().err


def test_the_estimate_warns_where_selective_recomputation_saves_nothing(capsys):
    def note(words: str) -> str:
        found = json.loads(said(capsys, f"--recompute selective --json {words}"))
        return next(note for note in found["notes"] if note.startswith("recompute selective"))

    # One float32 per query and head: 16 samples, 128 tokens, 4 heads.
    alone = note("--ranks 2")
    assert "saves 22,036,480 bytes instead of 22,069,248" in alone and "frees almost nothing" in alone
    assert "frees almost nothing" in note("--ranks 2 --mesh.cp 2")
    ulysses = note("--ranks 2 --mesh.cp 2 --parallel.context ulysses")
    assert "frees almost nothing" not in ulysses and "exchanges again" in ulysses


def test_the_estimate_warns_about_pointless_settings(capsys):
    """In one line or broken into several, as the table's width has it."""
    text = " ".join(said(capsys, "--ranks 2 --mesh.tp 2 --zero.stage 3").split())
    assert "zero.stage 3 shards nothing here" in text
    plain = " ".join(said(capsys, "--ranks 2").split())
    assert "zero.stage" not in plain


def test_the_table_shows_categories_own_peaks_and_shared_memory(capsys):
    words = "--ranks 2 --zero.stage 3 --recompute block --train.micro-batches 4"
    table, found = said(capsys, words), json.loads(said(capsys, f"{words} --json"))["ranks"][0]
    lines = dict(re.findall(r"^ *(.+?) {2,}([\d.]+ k?M?B)$", table, re.MULTILINE))
    held = {
        kind: count for kind, count in found["peak_breakdown"].items() if kind != "masters"
    }  # nobody has any: no line
    parts = [lines[kind] for kind in held]
    assert lines["peak memory"] == format_si(sum(found["peak_breakdown"].values()), "B")
    assert parts == [format_si(count, "B") for count in held.values()] and "masters" not in lines
    assert lines["peak activations"] == format_si(found["activation_bytes"], "B") != lines["activations"]
    assert lines["shared memory"] == format_si(found["shared_segment_bytes"], "B")
    gloo = said(capsys, f"{words} --comm.backend gloo")
    assert "shared memory" not in gloo
