"""The same programs started by torchrun, which gives no parent that could watch the rank status."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import AUTO, alive, needs_proc, until

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
import torch
from minidist.comm import GroupSpec, all_reduce, bind
from minidist.mesh import Mesh
from minidist.tools.launch import threads_per_rank
from minidist.tools.launch.torchrun import torchrun_world, under_torchrun
assert under_torchrun()
with torchrun_world(device="cpu") as world:
    grads = bind(world, Mesh(dp=world.size), [GroupSpec("grads", ("dp",))])["grads"]
    total = torch.tensor([world.rank + 1.0])
    all_reduce(total, grads)
    threads = torch.get_num_threads() == threads_per_rank(2, {})
    place = f"rank {world.rank} of {world.size} on {world.device} by {world.backend}"
    # One write: torchrun's ranks are unbuffered, and the end of a line would be another.
    sys.stdout.write(f"{place}: {total.item()} {threads}" + chr(10))
    sys.stdout.flush()
    if sys.argv[1] == "hang" and world.rank == 0:
        all_reduce(total, grads)
"""


def run(*command, **environ):
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def torchrun(tmp_path, how):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, how)


def test_a_program_under_torchrun_finds_its_place_and_ends_quietly(tmp_path):
    ended = torchrun(tmp_path, "end")
    assert ended.returncode == 0, ended.stderr
    said = [f"rank {rank} of 2 on cpu by {AUTO}: 3.0 True" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == said
    assert "Warning" not in ended.stderr and "Error" not in ended.stderr, ended.stderr


def test_a_deadlock_under_torchrun_is_reported_by_the_ranks_themselves(tmp_path):
    ended = torchrun(tmp_path, "hang")
    assert ended.returncode == 1
    line = PROGRAM[: PROGRAM.rindex("all_reduce")].count("\n") + 1
    assert (
        f"rank 0: waiting in all_reduce #2 (1,) float32 of 'grads' (ranks 0-1) at {tmp_path.name}/program.py:{line}"
        in (ended.stderr)
    )
    assert "rank 1 returned without launching all_reduce #2 of 'grads'" in ended.stderr


LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHELASTIC_RUN_ID"] = "x"
ask = "from minidist.tools.launch.torchrun import _own_environ; print(_own_environ().get('OMP_NUM_THREADS'))"
subprocess.run([sys.executable, "-c", ask], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows what a process was started with")
def test_the_one_thread_that_torchrun_sets_is_not_taken_for_the_users_wish():
    assert run("-c", LAUNCHER).stdout == "None\n"
    assert run("-c", LAUNCHER, OMP_NUM_THREADS="1").stdout == "1\n"


def test_a_port_in_use_is_named(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run(script, "end", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    told = ended.stderr.splitlines()[-1]
    assert told.startswith(f"minidist.errors.UserError: port {port} of 127.0.0.1") and "--master-port" in told


ORPHAN = """
import sys
from minidist.tools.launch.torchrun import torchrun_world
with torchrun_world(device="cpu") as world:
    sys.stdout.write(f"{__import__('os').getpid()}\\n")
    sys.stdout.flush()
    while True:
        sum(range(1000))
"""


@needs_proc
def test_a_killed_torchrun_leaves_no_rank(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(ORPHAN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.kill()
        assert until(lambda: not any(map(alive, pids)))
