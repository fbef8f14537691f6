"""`minidist simulate`: its output and its refusals."""

import json
import subprocess
import sys

import pytest

from minidist.tools.cli import main

PUBLISHED = "--stages 8 --micro-batches 24 --t-f 18.522 --t-b 18.086 --t-w 9.337 --t-comm 0.601"


def simulate(capsys, words):
    assert main(["simulate", *words.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("kind", "bubble"), [("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)])
def test_json_gives_the_published_bubble(capsys, kind, bubble):
    message = json.loads(simulate(capsys, f"--kind {kind} {PUBLISHED} --json"))
    assert message["bubble"] == bubble
    assert (message["kind"], message["stages"], message["micro_batches"], message["chunks"]) == (kind, 8, 24, 1)
    assert (
        message["total"] == pytest.approx(24 * 45.945 / (1 - bubble), rel=1e-4)
        and message["total"] <= message["makespan"]
    )
    assert message["busy"] == [1102.68] * 8
    alive = {"1f1b": [8, 7, 6, 5, 4, 3, 2, 1], "zb-h1": [8] * 8, "zb-h2": [15] * 8}
    assert message["peak_live"] == alive[kind]


def test_the_drawing_comes_with_the_numbers_and_fits_a_terminal(capsys):
    message = simulate(capsys, f"--kind zb-h1 {PUBLISHED}")
    assert "bubble     0.1585 of the total" in message and "peak live  8 micro-batches on each stage" in message
    assert message.count("\nstage ") == 8 and max(map(len, message.splitlines())) <= 100


def test_without_options_it_shows_one_f_one_b(capsys):
    message = simulate(capsys, "")
    assert message.startswith("1f1b: one forward, one backward") and "stage 3 " in message and "0.2727" in message


def test_a_long_line_is_wrapped(capsys):
    message = simulate(capsys, "--stages 40 --micro-batches 50")
    assert (
        "peak live  40 39 38" in message and "\n           " in message and max(map(len, message.splitlines())) <= 100
    )


def test_times_may_be_given_for_each_stage(capsys):
    message = json.loads(simulate(capsys, "--stages 3 --micro-batches 2 --t-f 1 2 4 --t-b 0 --t-w 0 --json"))
    assert message["busy"] == [2, 4, 8] and message["makespan"] == 11


def test_a_schedule_written_by_hand(capsys, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    message = json.loads(simulate(capsys, f"--file {file} --json"))
    assert (message["kind"], message["stages"], message["micro_batches"], message["peak_live"]) == (
        str(file),
        2,
        2,
        [2, 1],
    )


def test_the_chunks_of_a_file_may_be_a_v(capsys, tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("F0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0\n")
    assert json.loads(simulate(capsys, f"--file {file} --placement v --t-comm 1 --json"))["makespan"] == 6 + 4


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(capsys, tmp_path, suffix):
    file = tmp_path / f"pipeline.{suffix}"
    simulate(capsys, f"--kind zb-v --picture {file}")
    assert file.stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kind zb-h3", "there is no schedule 'zb-h3'; did you mean zb-h2? possible: gpipe, 1f1b, interleaved"),
        ("--kind interleaved --micro-batches 6", "6 is not a multiple of 4. Give 4 or 8"),
        (
            "--kind zb-h2 --micro-batches 4",
            "7 micro-batches in flight, but there are only 4: give 7 micro",
        ),
        ("--stages 0", "with 0 stages"),
        ("--stages -2", "with -2 stages"),
        ("--micro-batches 0", "with 0 micro-batches"),
        ("--chunks 2", "1f1b needs 1 chunk per stage, but chunks is 2"),
        ("--t-f -1", "t-f is -1.0; a time is a number, 0 or more"),
        ("--t-b 1 2 3", "t-b has 3 times for 4 stages: give 1 for all of them, or 4"),
        ("--t-comm nan", "t-comm is nan"),
        ("--file nowhere.txt", "--file nowhere.txt cannot be read: No such file"),
        ("--file dead.txt", "stage 1 waits at F1 (action 2 of 4) for stage 0's F1 (action 3). Put B0 before F1"),
        ("--file leak.txt", "stage 1 never runs B0 (the schedule is one of 1 micro-batch): the activation of F0 is"),
        ("--file leak.txt --stages 2", "--file leak.txt already determines --stages: leave --stages out"),
        ("--file .", "--file . cannot be read: Is a directory"),
        ("--file bytes.bin", "--file bytes.bin cannot be read: it is not a text file"),
        ("--picture nowhere/a.png", "--picture nowhere/a.png: there is no folder"),
        ("--picture a.gif2", "give a name that ends in .png, .svg or .pdf"),
        ("--picture a", "--picture a has an unknown file type"),
    ],
)
def test_invalid_options_are_refused_in_one_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dead.txt").write_text("F0 B0 F1 B1\nF0 F1 B0 B1\n")
    (tmp_path / "leak.txt").write_text("F0 B0\nF0\n")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00")
    assert main(["simulate", *words.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err and len(output.err.splitlines()) == 1 and not output.out


def test_it_starts_without_torch():
    program = (
        "import sys; from minidist.tools.cli import main; main(['simulate', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["bubble"] == 0.2727
