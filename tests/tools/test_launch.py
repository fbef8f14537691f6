"""The rank server: arguments, environment, results and errors of ranks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.errors import RunError, UserError
from minidist.tools.launch import RankFailure, RankServer, threads_per_rank
from minidist.tools.launch.device import choose_backend, choose_device
from tests.helpers.processes import DEFAULT_CPU_BACKEND, run_python

DEADLINE_S = 240.0
ROOT = Path(__file__).resolve().parents[2]
KEPT = []


# What ranks are given and give back


def count_merged_pages():
    """Merge this process's memory and fork: (merged MiB, whether the numbers are unchanged here and in the child)."""
    import numpy as np

    from minidist.tools.launch.huge_pages import merge_into_huge_pages

    numbers = np.arange(4 << 20, dtype=np.int64)  # 32 MiB
    merged = merge_into_huge_pages()
    child = os.fork()
    if child == 0:
        numbers[::1000] += 1  # copies the pages that it changes
        os._exit(int(numbers.sum() != (4 << 20) * ((4 << 20) - 1) // 2 + len(numbers[::1000])))
    ended_well = os.waitpid(child, 0)[1] == 0
    print(merged >> 20, ended_well and bool((numbers == np.arange(4 << 20)).all()))


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_memory_merged_into_huge_pages_keeps_its_contents():
    script = "from tests.tools.test_launch import count_merged_pages; count_merged_pages()"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    merged, unchanged = result.stdout.split()
    assert unchanged == "True", result.stderr
    if merged == "0":
        pytest.skip("this kernel merges no memory on request")
    assert int(merged) >= 30


def place_and_sum(world, start):
    KEPT.append(world.rank)
    total = torch.tensor([float(world.rank + start)])
    dist.all_reduce(total)
    print(f"I am {world.rank}", flush=True)
    print("to stderr", file=sys.stderr)
    return world.rank, world.size, world.local_rank, world.backend, total.item(), len(KEPT)


def test_ranks_return_values_and_output_by_rank(server):
    for _ in range(2):  # the second ranks are as fresh as the first: KEPT has one entry again
        result = server.run(place_and_sum, 3, (10,), deadline_s=DEADLINE_S)
        assert result.values == [(rank, 3, rank, DEFAULT_CPU_BACKEND, 33.0, 1) for rank in range(3)]
        assert result.output == [f"I am {rank}\nto stderr\n" for rank in range(3)]


def double(world, tensor):
    return tensor * 2


def test_large_arguments_and_results_pass(ranks):
    tensor = torch.arange(4_000_000, dtype=torch.float64)  # 32 MB, far more than a socket holds
    for doubled in ranks(double, 2, tensor):
        assert torch.equal(doubled, tensor * 2)


def surroundings(world):
    return os.getcwd(), os.environ.get("SAID_LATE"), torch.get_num_threads(), dist.is_initialized(), world.backend


def test_a_rank_has_the_folder_environment_and_threads_of_its_launch(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID_LATE", "yes")
    assert ranks(surroundings, 2) == [(str(tmp_path), "yes", threads_per_rank(2), True, DEFAULT_CPU_BACKEND)] * 2
    assert ranks(surroundings, 1, threads=3) == [(str(tmp_path), "yes", 3, False, None)]
    assert ranks(surroundings, 1, backend="gloo")[0][3:] == (True, "gloo")
    assert ranks(surroundings, 2, backend=None)[0][3:] == (False, None)


def test_without_capture_ranks_write_to_our_own_output(server, capfd):
    result = server.run(place_and_sum, 2, (0,), capture=False, deadline_s=DEADLINE_S)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["I am 0", "I am 1"] and err == "to stderr\n" * 2
    assert result.output == ["", ""]


def debug_level(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_debug_level().name, total.item(), os.getppid()


def test_spawned_ranks_and_variables_set_before_torch():
    with RankServer(method="spawn", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as server:
        values = server.run(debug_level, 2, deadline_s=DEADLINE_S).values
        assert values == [("DETAIL", 2.0, server.pid)] * 2


def load_by_path(file):
    """Import a file under a name that no other process could import."""
    spec = importlib.util.spec_from_file_location("only_known_here", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_known_here"] = module
    spec.loader.exec_module(module)
    return module


def test_functions_of_files_that_cannot_be_imported_go_by_path(ranks, tmp_path, monkeypatch):
    file = tmp_path / "script.py"
    file.write_text(
        "import os\nassert 'BROKEN' not in os.environ, 'no such luck'\n"
        "class Answer:\n    pass\n"
        "def answer(world, given):\n    given.rank = world.rank\n    return given\n"
    )
    module = load_by_path(file)
    assert [value.rank for value in ranks(module.answer, 2, module.Answer())] == [0, 1]
    monkeypatch.setenv("BROKEN", "yes")
    with pytest.raises(RunError) as caught:
        ranks(module.answer, 2, 1)
    assert f"{file} cannot be imported on the ranks: AssertionError: no such luck" in str(caught.value)


def test_a_script_that_starts_ranks_when_it_is_imported_is_refused_by_its_ranks(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "from minidist.tools.launch import RankServer\n"
        "def answer(world):\n    return world.rank\n"
        "with RankServer() as server:\n    print(server.run(answer, 2).values)\n"
    )
    ended = run_python(str(file))
    assert ended.returncode == 1
    assert f"{file} starts ranks, and each rank imports the file" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr


# What cannot work is said at once


def test_only_functions_of_files_can_be_sent(server):
    with pytest.raises(UserError, match="define it with `def` at the top level of a file"):
        server.run(lambda world: None, 2)


def test_arguments_that_cannot_be_pickled_are_refused(server):
    with pytest.raises(UserError, match="arguments of double cannot be sent to ranks"):
        server.run(double, 2, (lambda: None,))


@pytest.mark.parametrize("count", [0, -1, 2.0])
def test_a_number_of_ranks_that_is_none_is_refused(server, count):
    with pytest.raises(UserError, match="give a whole number of at least 1"):
        server.run(double, count)


def unpicklable(world):
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_one_message(ranks):
    with pytest.raises(RankFailure, match="result of unpicklable is a function, which cannot be pickled") as caught:
        ranks(unpicklable, 2)
    assert str(caught.value).count("cannot be pickled and sent back") == 1


@pytest.mark.parametrize(
    ("gpus", "asked", "local_size", "device", "backend"),
    [
        (0, "auto", 2, "cpu", DEFAULT_CPU_BACKEND),
        (2, "auto", 2, "cuda:1", "nccl"),
        (1, "cuda", 1, "cuda:0", None),
        (1, "auto", 2, "cpu", DEFAULT_CPU_BACKEND),
        (1, "cuda:0", 2, "cuda:0", DEFAULT_CPU_BACKEND),
        (8, "cpu", 2, "cpu", DEFAULT_CPU_BACKEND),
    ],
)
def test_the_device_decides_the_backend(monkeypatch, gpus, asked, local_size, device, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen = choose_device(asked, local_size - 1, local_size)
    assert (str(chosen), choose_backend("auto", chosen, asked, local_size)) == (device, backend)


def test_more_ranks_than_gpus_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in range(3):
        choose_device("auto", rank, 3)
    assert capsys.readouterr().err == "3 ranks and 1 GPU: running on the CPU\n"


def test_cuda_with_fewer_gpus_than_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = (
        "--device cuda needs one GPU per rank: 3 ranks, and torch sees 2 GPUs here. Start 2 ranks, or give --device"
    )
    with pytest.raises(UserError, match=message):
        choose_device("cuda", 0, 3)


def test_a_rank_that_sees_only_its_own_gpu_takes_it(monkeypatch):
    """As under Slurm's --gpus-per-task=1; torchrun shows every rank all GPUs, so there one GPU is shared."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert [str(choose_device(asked, 3, 4)) for asked in ("auto", "cuda")] == ["cuda:0", "cuda:0"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert str(choose_device("auto", 3, 4)) == "cpu"


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="sees no GPU here. Give --device cpu"):
        choose_device("cuda", 0, 1)


# Ranks that raise, exit and die


def fail_differently(world):
    if world.rank == 3:
        return "fine"
    if world.rank == 0:
        raise KeyError("missing")
    torch.zeros(2) + torch.zeros(3)


def test_equal_errors_are_reported_once(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(fail_differently, 4)
    error = caught.value
    assert (error.kind, error.ranks) == ("raised", (0, 1, 2))
    assert "rank 0 raised KeyError: 'missing'\n" in str(error)
    assert "ranks 1-2 raised RuntimeError: The size of tensor a (2)" in str(error)
    assert f"{__file__}:" in str(error) and "in fail_differently" in str(error)
    assert "launch/rank.py" not in error.tracebacks[0] and error.tracebacks[0].startswith("Traceback")
    assert any("[ranks 1-2] Traceback" in note for note in error.__notes__)


def refuse(world):
    raise UserError("pp=3 does not fit 2 ranks")


def test_a_user_error_of_the_ranks_is_raised_here(ranks):
    with pytest.raises(UserError, match="^pp=3 does not fit 2 ranks$"):
        ranks(refuse, 2)


def exit_with(world, code):
    print("before the end")
    dist.barrier()
    sys.exit(code)


def test_an_exit_code_is_reported(server):
    with pytest.raises(RankFailure) as caught:
        server.run(exit_with, 2, (2,), deadline_s=DEADLINE_S)
    assert str(caught.value) == "ranks 0-1 died: exited with code 2"
    assert caught.value.output == ["before the end\n"] * 2


def test_exit_code_zero_is_a_return(ranks):
    assert ranks(exit_with, 2, 0) == [None, None]
