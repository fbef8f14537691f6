"""The benchmark of restarts: it kills ranks under torchrun, and refuses impossible options."""

import json
import sys

import pytest

from bench.__main__ import main
from bench.compare_restarts import measure_recovery
from tests.helpers.small_run import OPTIONS, write_text


@pytest.mark.exhaustive
def test_a_restart_is_measured_beside_that_of_an_empty_program(server, tmp_path, capsys):
    file = tmp_path / "restart.json"
    train = " ".join((*OPTIONS, "--data.path", str(write_text(tmp_path))))
    options = ["--ranks", "2", "--rounds", "1", f"--train={train}", "--json", str(file)]
    assert main(["restart", *options], server) == 0
    seconds = json.loads(file.read_text())["seconds"]
    assert list(seconds) == ["empty program", "import torch", "minidist train"]
    assert all(len(times) == 1 and times[0] > 0 for times in seconds.values())
    assert "beyond an empty program" in capsys.readouterr().out


def test_a_process_that_outlives_its_program_does_not_delay_the_end(tmp_path):
    child = "import time; print('ready', flush=True); time.sleep(1000)"
    text = f"import subprocess, sys\nfor _ in range(2):\n    subprocess.run([sys.executable, '-c', {child!r}])"
    [seconds] = measure_recovery([sys.executable, "-c", text], tmp_path, "ready", ["ready"], 1)
    assert seconds > 0


@pytest.mark.exhaustive
def test_a_start_is_measured_beside_those_of_other_programs(server, tmp_path, capsys):
    file = tmp_path / "start.json"
    assert main(["start", "--ranks", "1", "--rounds", "1", "--json", str(file)], server) == 0
    measured = json.loads(file.read_text())["wall and CPU seconds"]
    assert list(measured) == ["empty program", "import torch", "minidist train"]
    assert all(cpu_s > 0 for [[_, cpu_s]] in measured.values())


@pytest.mark.parametrize("command", ["restart", "start"])
def test_impossible_options_are_refused(server, capsys, command):
    assert main([command, "--rounds", "0"], server) == 2
    assert "--rounds is 0; it must be at least 1" in capsys.readouterr().err
