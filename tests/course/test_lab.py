"""`python -m exercises lab`, which `make lab` calls: the program, arguments and environment it starts."""

import json
import os
import subprocess
import sys

import pytest

from exercises import jupyterlab
from exercises.__main__ import main
from exercises.catalogue import ROOT, Catalogue
from exercises.work import Work


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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A notebook's kernel in a learner's folder: `kernel(source, *answers)` returns (reply, text of the outputs).

    answers: what a person types into the input fields of the cell; without any, a program runs the cell.
    """
    client_module = pytest.importorskip("jupyter_client.manager")
    private = tmp_path_factory.mktemp("kernel")
    work = Work(private / "work")
    work.update(Catalogue())
    environ = {**os.environ, "IPYTHONDIR": str(private / "ipython"), "PYTHONPATH": str(ROOT)}
    folder = work.folder / "chapters" / "01_data_distribution"
    manager, client = client_module.start_new_kernel(kernel_name="python3", cwd=str(folder), env=environ)

    def run(source: str, *answers: str):
        texts, left = [], list(answers)

        def show(message):
            content = message["content"]
            data = content.get("data", {}).get("text/plain") or content.get("text") or content.get("traceback")
            texts.append("\n".join(data) if isinstance(data, list) else data or "")

        def answer(_):
            client.input(left.pop(0))

        reply = client.execute_interactive(
            source, allow_stdin=bool(answers), stdin_hook=answer, output_hook=show, timeout=120
        )
        assert not left, "the cell did not ask"
        return reply["content"], "".join(texts)

    run.work = work
    loaded, _ = run("%load_ext exercises\nfrom minidist.tools.notebook import predict, score_prediction")
    assert loaded["status"] == "ok"
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


ASK = "predict('kernel-bytes', 'How many?', answer=None, unit='bytes')"


def test_a_prediction_stops_the_queue_once_and_is_stored(kernel):
    assert kernel(ASK)[1] == "How many?"  # a program is not asked
    reply, told = kernel(ASK, "")
    assert reply["status"] == "error"  # at which Jupyter drops the cells that are queued behind this one
    assert reply["ename"] == "UnansweredError" and "Traceback" not in told
    assert told.endswith("or replace None with your prediction first.")
    reply, told = kernel(ASK)
    assert reply["status"] == "ok" and told == "How many?"
    reply, told = kernel(ASK.replace("kernel-bytes", "kernel-asked"), "4,000 bytes")
    assert reply["status"] == "ok" and told == "How many?\nyou expect 4,000 bytes"
    assert kernel.work.read()["predictions"]["kernel-asked"]["answer"] == "4,000"
    assert "right" in kernel("score_prediction('kernel-asked', 4000)")[1]


def test_magics_in_a_kernel(kernel):
    told = kernel("%ranks 2")[1] + kernel("%%ranks\nx = [rank]\nbreakpoint()\nx")[1]
    assert "line 3 of the cell" in told and "x = [1]" in told
    assert "you have not passed token_count yet" in kernel("%solution token_count")[1]
    assert kernel("%train token_count")[1].startswith("not passed yet: token_count; pass one")


def test_lab_without_jupyterlab_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--work", str(tmp_path / "mine"), "lab"]) == 2
    assert "JupyterLab is not installed here; make lab installs it" in capsys.readouterr().err
