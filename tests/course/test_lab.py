"""`python -m exercises lab`, which `make lab` calls: the program, arguments and environment it starts."""

import json
import os
import subprocess
import sys

import pytest

from exercises import jupyterlab
from exercises.__main__ import main
from exercises.catalogue import ROOT


@pytest.fixture
def started(monkeypatch):
    """The (program, arguments, environment) that `lab` would have executed."""
    results = []
    monkeypatch.setattr(os, "execve", lambda *program: results.append(program))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    return results


def test_lab_fills_the_learners_folder_and_starts_jupyterlab(tmp_path, started, capsys):
    assert main(["--work", str(tmp_path / "mine"), "lab", "--no-browser", "--port", "9999"]) == 0
    ((program, arguments, _),) = started
    assert program == sys.executable and arguments[:3] == [sys.executable, "-m", "jupyterlab"]
    assert arguments[3:5] == ["--ServerApp.root_dir", str(tmp_path / "mine")]
    assert arguments[5:7] == ["--LabApp.default_url", "/lab/tree/chapters/00_first_run/00_first_run.ipynb"]
    assert arguments[7:] == ["--no-browser", "--port", "9999"]
    assert (tmp_path / "mine" / "progress.json").is_file()
    assert "exercises and " in capsys.readouterr().out


def test_terminals_of_lab_find_this_python_and_the_exercises(tmp_path):
    """From a folder that has an `exercises` of its own, as the learner's has."""
    (tmp_path / "exercises").mkdir()
    environ = jupyterlab.jupyterlab_environment(os.environ)
    listed = subprocess.run(
        ["python", "-m", "exercises", "list"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0 and "block_partition" in listed.stdout, listed.stderr


def test_lab_keeps_environment_variables(monkeypatch):
    environ = jupyterlab.jupyterlab_environment({"PATH": "/bin", "PYTHONPATH": "/mine", "OTHER": "1"})
    assert environ["PATH"].split(os.pathsep)[-1] == "/bin" and environ["OTHER"] == "1"
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/mine"]
    assert jupyterlab.jupyterlab_environment({})["PYTHONPATH"] == str(ROOT)


def test_the_courses_settings_are_where_jupyterlab_looks():
    folder = jupyterlab.jupyterlab_environment({})["JUPYTER_CONFIG_PATH"]
    with open(os.path.join(folder, "labconfig", "default_setting_overrides.json")) as file:
        assert json.load(file)["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


def test_lab_without_jupyterlab_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--work", str(tmp_path / "mine"), "lab"]) == 2
    assert "JupyterLab is not installed here; make lab installs it" in capsys.readouterr().err
