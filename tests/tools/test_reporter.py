"""The output of a run: log lines, the live view and the picture."""

import contextlib
import io
import math
import time

import pytest
from matplotlib import image
from rich.console import Console

from minidist.comm import World
from minidist.fault.signals import StopSignalRecorder
from minidist.tools.console.lines import PlainView, format_final_losses, format_metrics
from minidist.tools.console.live import LiveView, sparkline
from minidist.tools.console.loss_plot import draw_loss, place_baseline_labels
from minidist.tools.console.metrics import mfu
from minidist.tools.console.reporter import RunReporter
from minidist.tools.console.sample_text import decode_printable
from minidist.train.step_result import StepResult
from tests.helpers.small_run import make_trainer, small_config, write_text

ROW = {
    "step": 20,
    "tokens": 640,
    "loss": 2.5,
    "grad_norm": 1.25,
    "lr": 3e-3,
    "step_time_s": 0.17,
    "tokens_per_s": 24094.1,
    "comm_bytes": 3_281_592,
    "memory": 497_000_000,
}
LANES = [
    {"step_time_s": 0.17, "comm_bytes": 3_281_592, "memory": 497_000_000},
    {"step_time_s": 0.085, "comm_bytes": 3_100_000, "memory": 321_000_000},
]
LINES = {"unigram": 3.3236, "bigram": 2.4776}


def test_a_log_step_is_one_line():
    assert format_metrics(ROW) == (
        "step     20  loss 2.5000  grad norm 1.250  lr 3.00e-03  170 ms  24,094 tokens/s  sent 3.3 MB  memory 497 MB"
    )
    assert format_metrics({**ROW, "loss": None, "mfu": 0.4321}).endswith("mfu 43.2%")
    assert "loss no tokens" in format_metrics({**ROW, "loss": None})


def test_the_end_is_compared_with_counting():
    assert format_final_losses(1.25, LINES) == (
        "held-out loss 1.2500 nats per token (unigram 3.3236, bigram 2.4776): below the bigram model"
    )
    assert format_final_losses(2.5, LINES).endswith(": not below the bigram model")


def test_plain_lines_come_in_the_order_of_events(capsys):
    view = PlainView(["first", "second"])
    view.show_metrics(ROW, LANES)
    view.show_held_out_loss(20, 2.25)
    view.show_sample("def ", "f():\n    pass")
    view.show_final_losses(1.25, LINES)
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "first",
        "second",
        format_metrics(ROW),
        "step     20  held-out loss 2.2500",
        "sample: held-out text up to the bar, then the model",
        "    def ┃f():",
        "        pass",
        format_final_losses(1.25, LINES),
    ]


def drawn(console: Console, live: LiveView) -> str:
    with console.capture() as capture:
        console.print(live._draw())
    return capture.get()


def test_the_live_view_shows_numbers_and_a_lane_per_rank():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    live = LiveView(["a [bracketed] header"], 50, 10, console=console)
    try:
        assert "the first step is running" in drawn(console, live) and "10/50" in drawn(console, live)
        live.show_step(20, StepResult(2.5, 32.0, 1.25, True, True, False))
        live.show_metrics(ROW, LANES)
        live.show_held_out_loss(20, 2.25)
        live.print_note("checkpoint: [red]folder")
        shown = drawn(console, live)
    finally:
        live.close()
    for text in ("20/50", "2.5000", "held-out loss", "2.2500", "1.250", "24,094", "Ctrl-C: save and stop"):
        assert text in shown
    slow, fast = (line for line in shown.splitlines() if " ms " in line)
    assert slow.split()[:3] == ["0", "170", "ms"] and fast.split()[:3] == ["1", "85", "ms"]
    assert slow.count("█") == 2 * fast.count("█") and "3.3 MB" in slow and "321 MB" in fast
    message = console.file.getvalue()
    assert "a [bracketed] header" in message and "checkpoint: [red]folder" in message
    assert "Ctrl-C" not in drawn(console, live), "there is nothing to interrupt any more"
    # What hides the cursor must show it again.
    assert message.count("\x1b[?25l") == message.count("\x1b[?25h") == 1


def test_the_live_view_acknowledges_a_signal_without_waiting_for_the_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    stop = StopSignalRecorder()
    live = LiveView(["header"], 50, console=console, stop=stop)
    try:
        stop.signal_name = "SIGINT"  # no event of the run follows: the view's own refresh shows it
        end_s = time.monotonic() + 10
        while "SIGINT: saving" not in console.file.getvalue() and time.monotonic() < end_s:
            time.sleep(0.05)
        assert "SIGINT: saving after this step; Ctrl-C stops the run at once" in console.file.getvalue()
        stop.signal_name = "SIGTERM"
        shown = drawn(console, live)
    finally:
        live.close()
    assert "SIGTERM: saving after this step" in shown and "Ctrl-C" not in shown


def test_a_sparkline_falls_with_its_values():
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(sparkline([float(i) for i in range(100)], 10)) == 10
    assert sparkline([], 10) == "" and sparkline([1.0, 1.0], 10) == "▁▁"


def test_text_cannot_drive_the_terminal():
    assert decode_printable(b"a\x1b[2Jb\tc\n\xff") == "a\ufffd[2Jb\tc\n\ufffd"


def test_the_picture_holds_what_was_measured(tmp_path):
    rows = [{"start": 0}] + [{"step": n, "loss": 5.0 / n} for n in (1, 2, 3)]
    rows += [{"step": 3, "held_out_loss": 1.75}, {"step": 4, "loss": None}]
    curves = draw_loss(rows, LINES, tmp_path / "loss.png")
    assert curves == {"training": [(1, 5.0), (2, 2.5), (3, 5.0 / 3)], "held out": [(3, 1.75)]}
    pixels = image.imread(tmp_path / "loss.png")
    blank = tmp_path / "blank.png"
    draw_loss([], {}, blank)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    assert (pixels[..., :3] < 0.9).any(axis=2).sum() > (image.imread(blank)[..., :3] < 0.9).any(axis=2).sum()


def test_labels_of_lines_close_together_do_not_overlap():
    places = place_baseline_labels({"b": 2.0, "c": 2.01, "a": 1.0, "d": 2.02}, low=1.0, high=5.0)
    assert places[2] == 0.0 and places[0] == 0.25
    ordered = [places[2], places[0], places[1], places[3]]
    assert all(above - below >= 0.05 for below, above in zip(ordered, ordered[1:], strict=False))


def test_mfu_is_the_model_s_operations_over_the_peak():
    assert mfu(6e9, 1000.0, 2, 30e12) == pytest.approx(0.1)
    assert math.isclose(mfu(6e9, 1000.0, 4, 30e12), 0.05)


def test_the_header_says_which_files_of_the_data_are_left_out(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    write_text(tmp_path / "texts")
    (tmp_path / "texts" / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    with contextlib.closing(
        make_trainer(World.single(), small_config(tmp_path / "run", tmp_path / "texts"))
    ) as trainer:
        RunReporter().on_start(trainer)
    assert "1 of 2 files are left out: 1 not UTF-8 text, first latin1.txt (byte 2 is 0xfc)" in capsys.readouterr().out
