"""The Makefile: where `CPU=1` takes the CPU build of torch from. A stub of Python stands in for pip."""

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[1] / "Makefile"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Appends its arguments to the file `calls`; fails, as pip does, unless one of them is the index that has the build.
STUB = """#!/bin/sh
echo "$@" >> calls
for word in "$@" "$PIP_INDEX"; do [ "$word" = "$INDEX_WITH_BUILD" ] && exit 0; done
echo "ERROR: No matching distribution found" >&2
exit 1
"""


@pytest.fixture
def make(tmp_path):
    """`make(*words, has, configured)`: the finished `make CPU=1 WORDS`, and the indexes given to each call of pip.

    has: the index that has the build. configured: the index in pip's own configuration.
    """
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(STUB)
    python.chmod(0o755)
    (tmp_path / ".venv/python").touch()
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "pyproject.toml").touch()

    def run(*words, has, configured="pypi"):
        environ = {"PATH": "/usr/bin:/bin", "INDEX_WITH_BUILD": has, "PIP_INDEX": configured}
        command = ["make", "PYTHON=false", "CPU=1", ".venv/torch-cpu", *words]
        ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        calls = (tmp_path / "calls").read_text().splitlines()
        assert all(call.startswith("-m pip install ") and "torch==" in call for call in calls)
        return ended, [call.split("torch==")[1].split()[1:] for call in calls]

    return run


def test_the_cpu_build_comes_from_pytorchs_index_where_pip_does_not_know_another(make):
    ended, indexes = make(has=PYTORCH_INDEX)
    assert (ended.returncode, ended.stderr) == (0, ""), "the first try, which may fail, is silent"
    assert indexes == [[], ["--extra-index-url", PYTORCH_INDEX]]


def test_pips_own_configuration_comes_first(make):
    ended, indexes = make(has="mirror", configured="mirror")
    assert (ended.returncode, indexes) == (0, [[]])


def test_torch_index_is_the_only_index_if_given(make):
    ended, indexes = make("TORCH_INDEX=mirror", has="mirror", configured=PYTORCH_INDEX)
    assert (ended.returncode, indexes) == (0, [["--index-url", "mirror"]])


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([], f"with pip's own configuration or from {PYTORCH_INDEX}"),
        (["TORCH_INDEX=mirror"], "from mirror"),
    ],
)
def test_an_index_without_the_build_ends_in_one_message_that_names_it(make, words, where):
    ended, _ = make(*words, has="none")
    assert ended.returncode == 2
    assert ended.stderr.count("No matching distribution") == 1
    (message,) = [line for line in ended.stderr.splitlines() if line.startswith("CPU=1: ")]
    assert f"cannot be installed {where}; pip's report is above. Name an index" in message
    assert "make CPU=1 TORCH_INDEX=<address> " in message
