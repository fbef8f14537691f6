"""Without a loopback interface a run of several ranks is refused in one sentence, within seconds."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from minidist.errors import UserError
from minidist.tools.launch import loopback, torchrun
from tests.helpers.small_run import OPTIONS, write_text

MESSAGE = (
    "2 ranks on this machine need its loopback interface, and 127.0.0.1 cannot be reached (Network is unreachable): "
    "bring it up with `ip link set lo up`, or give --ranks 1."
)


@pytest.fixture
def no_loopback(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", refuse)


def test_a_machine_without_a_loopback_interface_is_refused(no_loopback):
    with pytest.raises(UserError) as refused:
        loopback.check_loopback(2)
    assert str(refused.value) == MESSAGE


def test_a_machine_with_one_is_accepted():
    loopback.check_loopback(2)


def test_a_server_starts_no_ranks_without_it(server, no_loopback):
    with pytest.raises(UserError, match="2 ranks on this machine need its loopback interface"):
        server.run(os.getpid, 2)


def test_a_rank_under_torchrun_looks_for_it_before_torch_does(no_loopback, monkeypatch):
    monkeypatch.setattr(torchrun, "_open_store", None)  # is not reached
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, text in {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match="2 ranks on this machine"), torchrun.torchrun_world("cpu"):
        pass


def test_the_command_says_so_in_a_network_namespace_without_it(tmp_path):
    alone = ("unshare", "-rn")
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("unshare makes no network namespace here")
    command = (sys.executable, "-m", "minidist", "train", *OPTIONS, "--ranks", "2", "--data.path", write_text(tmp_path))
    ended = subprocess.run([*alone, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"minidist: {MESSAGE}\n")
