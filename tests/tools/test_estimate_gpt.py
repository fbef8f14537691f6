"""`minidist estimate --block gpt` gives the published activations, MFU and HFU of Megatron's GPT."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from minidist.tools.cli import main

PUBLISHED = json.loads((Path(__file__).resolve().parents[1] / "published" / "activation_memory.json").read_text())


def estimate_json(capsys, words: str) -> dict:
    assert main(["estimate", "--block", "gpt", "--json", *words.split()]) == 0
    return json.loads(capsys.readouterr().out)


def sized(seq_len: int, samples: int, hidden: int, heads: int, tp: int, layers: int = 1, vocab: int = 51200) -> str:
    return (
        f"--ranks {tp} --mesh.tp {tp} --data.seq-len {seq_len} --train.global-batch {samples} "
        f"--model.num-layers {layers} --model.hidden-size {hidden} --model.num-heads {heads} --model.vocab-size {vocab}"
    )


# Rows of table 2, and what they are called here.
FORMS = {
    "no parallelism": "",
    "tensor": "",
    "tensor+sequence": "--parallel.sequence",
    "tensor+sequence+selective recompute": "--parallel.sequence --recompute selective",
    "full recompute": "--recompute block",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "s, b, h, a, t", [(2048, 4, 6144, 64, 8), (2048, 1, 12288, 96, 8), (1024, 3, 5120, 40, 4), (512, 2, 96, 6, 2)]
)
def test_activation_bytes_of_a_layer_match_the_paper(capsys, form, s, b, h, a, t):
    t = 1 if form == "no parallelism" else t
    found = estimate_json(capsys, f"{sized(s, b, h, a, t)} {FORMS[form]}")
    # "s b h (34 + 5 a s / h)", with what is only written side by side multiplied.
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", PUBLISHED["per_layer_bytes_16bit"][form])
    assert found["layer_saved_bytes"] == eval(formula, {}, {"s": s, "b": b, "h": Fraction(h), "a": a, "t": Fraction(t)})
    assert found["layer_saved_bytes"] == sum(tensor["bytes"] for tensor in found["layer_saved_tensors"])


ROW = PUBLISHED["row_22b"]
SIZES_22B = sized(ROW["seq"], ROW["global_batch"], ROW["hidden"], ROW["heads"], ROW["tp"], ROW["layers"], ROW["vocab"])
TIMED = f"--step-time-s {ROW['iteration_s']} --peak-tflops 312"


def test_utilisation_matches_the_paper(capsys):
    found = estimate_json(capsys, f"{SIZES_22B} --parallel.sequence --recompute selective {TIMED}")
    assert found["world_size"] == ROW["gpus"]
    # The published iteration time is rounded to 10 ms, which is up to 0.2 points.
    assert 100 * found["mfu"] == pytest.approx(ROW["mfu_percent"], abs=0.2)
    assert 100 * found["hfu"] == pytest.approx(ROW["hfu_percent"], abs=0.2)
    assert found["parameters"] == pytest.approx(22e9, rel=0.01)


def test_flops_are_the_formulas_of_appendix_a(capsys):
    layers, h, s, v = ROW["layers"], Fraction(ROW["hidden"]), ROW["seq"], ROW["vocab"]
    each, head = 72 * ROW["global_batch"] * layers * s * h**2, v / (12 * layers * h)
    again = {"none": 0, "selective": s / (6 * h), "block": Fraction(1, 3) + s / (18 * h)}
    for kind, more in again.items():
        found = estimate_json(capsys, f"{SIZES_22B} --recompute {kind}")
        assert found["flops_per_step"] == each * (1 + s / (6 * h) + head)
        assert found["hardware_flops_per_step"] == each * (1 + s / (6 * h) + head + more)
        assert found["mfu"] is found["hfu"] is None
        assert any("published" in note and "s / 3h" in note for note in found["notes"]) == (kind == "selective")


def test_the_table_says_it_in_words(capsys):
    assert main(["estimate", "--block", "gpt", *SIZES_22B.split(), *TIMED.split()]) == 0
    table = capsys.readouterr().out
    assert "MFU 41.65 %, HFU 41.65 %: 1.1 s a step on 8 x 312 TFLOP/s" in table
    assert re.search(r"softmax +4x8x2048x2048 +float16 +268,435,456", table)
    assert max(map(len, table.splitlines())) <= 120


def test_a_context_axis_is_refused(capsys):
    assert main(["estimate", "--block", "gpt", "--ranks", "2", "--mesh.cp", "2"]) == 2
    assert "--mesh.cp is 2, and the figures of --block gpt are published without" in capsys.readouterr().err


def test_it_starts_without_torch():
    program = (
        "import sys; from minidist.tools.cli import main; "
        "main(['estimate', '--block', 'gpt', '--ranks', '2', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0 and json.loads(result.stdout)["block"] == "gpt", result.stderr
