"""Programs started by torchrun, where no parent process watches the status of the ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import DEFAULT_CPU_BACKEND, is_alive, needs_proc, run_python, wait_until

pytestmark = pytest.mark.process_lifecycle

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
import torch
from minidist.comm import GroupSpec, all_reduce, bind
from minidist.mesh import Mesh
from minidist.tools.launch import threads_per_rank
from minidist.tools.launch.torchrun import torchrun_world, is_under_torchrun
assert is_under_torchrun()
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


def torchrun(tmp_path, how):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, how)


def test_a_program_under_torchrun_finds_its_ranks_and_ends_quietly(tmp_path):
    ended = torchrun(tmp_path, "end")
    assert ended.returncode == 0, ended.stderr
    message = [f"rank {rank} of 2 on cpu by {DEFAULT_CPU_BACKEND}: 3.0 True" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == message
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


IN_FLIGHT = """
import time
import torch
import torch.distributed as dist
from minidist.tools.launch.torchrun import torchrun_world
with torchrun_world(device="cpu", backend="gloo") as world:
    if world.rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("no more")
    time.sleep(1000)
"""


def test_a_rank_that_fails_with_an_operation_in_flight_ends(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(IN_FLIGHT)
    ended = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert ended.returncode == 1 and "ValueError: no more" in ended.stderr


LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHELASTIC_RUN_ID"] = "x"
ask = "from minidist.tools.launch.torchrun import _user_environ; print(_user_environ().get('OMP_NUM_THREADS'))"
subprocess.run([sys.executable, "-c", ask], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc shows what a process was started with")
def test_torchruns_omp_num_threads_of_one_is_ignored():
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for given, told in (({}, "None\n"), ({"OMP_NUM_THREADS": "1"}, "1\n")):
        ended = subprocess.run([sys.executable, "-c", LAUNCHER], env=kept | given, capture_output=True, text=True)
        assert ended.stdout == told, ended.stderr


def test_a_port_in_use_is_named(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_python(script, "end", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    told = ended.stderr.splitlines()[-1]
    assert told.startswith(f"minidist.errors.UserError: port {port} of 127.0.0.1") and "--master-port" in told


def test_live_recovery_is_refused_on_every_rank(tmp_path):
    """torchrun ends the other ranks of a node itself, and restarts all nodes; no rank has started to connect yet."""
    command = ("-m", "minidist", "train", "--fault.live-recovery", "--folder", str(tmp_path / "run"))
    for rank in ("0", "1"):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        ended = run_python(*command, **torchrun)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr and not (tmp_path / "run").exists()
        message = "--fault.live-recovery under torchrun, which ends all ranks when one dies: leave it out"
        assert message in ended.stderr  # here also of rank 1, as there is no rank 0 beside it


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
        assert wait_until(lambda: not any(map(is_alive, pids)))
