"""Elastic runs: torchrun agents come and go, and the run goes on as if nothing had happened."""

import json
import os
import signal
import threading

import pytest
from torch.distributed import PrefixStore, TCPStore

from bench.namespaces import two_nodes, why_impossible
from minidist.tools.launch.attempt import agree_on_attempt
from tests.helpers.agents import Agents
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import (
    OPTIONS,
    Command,
    read_curve,
    read_metrics,
    small_config,
    train_small,
    with_changes,
    write_text,
)

LONG = (
    *(*OPTIONS, "--train.steps", "1000000", "--checkpoint.every", "20", "--train.log-every", "1"),
    *("--optim.schedule", "constant"),  # so that the learning rate does not depend on the number of steps
    # With float64 the losses of any two layouts agree to 1e-9, however many steps there are.
    *("--train.eval-every", "0", "--precision.policy", "fp64"),
)


class Run:
    """The metrics of an elastic run, while it goes on."""

    def __init__(self, folder):
        self.folder = folder / "runs" / "0001"

    def rows(self) -> list[dict]:
        """The metrics, without a line that is just being written."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def starts(self) -> list[int]:
        """The number of ranks of each attempt."""
        return [row["ranks"] for row in self.rows() if "start" in row]

    def step(self) -> int:
        """The last step."""
        return max((row.get("step", 0) for row in self.rows()), default=0)


def go_on(job, run, size):
    """Wait until an attempt on `size` ranks has saved a checkpoint."""
    job.wait_for(lambda: run.starts()[-1:] == [size])
    step = run.step()
    job.wait_for(lambda: run.step() >= step + 30)


def stop(job, *agents):
    """End the job by SIGTERM to all its agents."""
    for agent in agents:
        agent.terminate()
    for agent in agents:
        agent.end()
    assert "stopped after step" in job.output()


def assert_is_the_uninterrupted_run(run, tmp_path, *options):
    """Compare the metrics with those of a run on one process: steps, learning rates and losses."""
    rows = read_curve(run.folder)
    named = zip(options[::2], options[1::2], strict=True)
    options = [word for name, value in named if not name.startswith("--mesh.") for word in (name, value)]
    options = (*options, "--ranks", "1", "--folder", "uninterrupted", "--train.steps", str(rows[-1]["step"]))
    with Command("train", *options, folder=tmp_path, environ={"OMP_NUM_THREADS": "1"}) as command:
        assert command.end() == 0, command.output
    expected = [row for row in read_curve(tmp_path / "uninterrupted") if "loss" in row]
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, right in zip(rows, expected, strict=True):
        assert (row["lr"], row["tokens"]) == (right["lr"], right["tokens"]), row["step"]
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(right[name], abs=1e-9), row["step"]


def test_the_ranks_of_an_attempt_agree_on_a_name_that_no_earlier_attempt_had():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = []

    def agree(rank):
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        names.append(agree_on_attempt(PrefixStore("job", client), rank, 3, timeout_s=60.0))

    for attempt in range(2):
        # In the second attempt the first rank sees the requests of the first one.
        threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(names) == 3 * (attempt + 1) and len(set(names)) == attempt + 1


def test_a_run_goes_on_when_a_node_joins(tmp_path):
    train = (*LONG, "--data.path", str(write_text(tmp_path)))
    run = Run(tmp_path)
    with Agents(tmp_path, *train) as job:
        first = job.start()
        go_on(job, run, 1)
        second = job.start()
        go_on(job, run, 2)
        stop(job, first, second)
    assert run.starts() == [1, 2]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["0001"]
    assert_is_the_uninterrupted_run(run, tmp_path, *train)


TP = ("--mesh.tp", "2")
PP = ("--mesh.pp", "2", "--model.num-layers", "2", "--train.micro-batches", "2")


@pytest.mark.parametrize(
    "layout",
    exhaustive(
        ((),), (("--zero.stage", "1"),), (("--zero.stage", "3"),), ((*TP,),), ((*PP,),), ((*TP, "--zero.stage", "3"),)
    ),
)
def test_every_layout_goes_on_on_the_nodes_that_are_left(tmp_path, layout):
    """The first node is lost, a new one joins, and one is taken back with a warning."""
    train = (*LONG, "--data.path", str(write_text(tmp_path)), *layout)
    run, ranks = Run(tmp_path), 2 if "--mesh.tp" in layout or "--mesh.pp" in layout else 1
    with Agents(tmp_path, *train, ranks_per_node=ranks) as job:
        first, second = job.start(), job.start()
        go_on(job, run, 2 * ranks)
        first.kill()
        go_on(job, run, ranks)
        third = job.start()
        go_on(job, run, 2 * ranks)
        second.terminate()
        go_on(job, run, ranks)
        stop(job, third)
    # A node that is taken back saves, so the others repeat no step.
    *_, before, after = [row for row in run.rows() if "start" in row]
    assert after["start"] > before["start"]
    assert_is_the_uninterrupted_run(run, tmp_path, *train)


@pytest.mark.exhaustive
def test_a_killed_rank_of_one_of_two_agents_restarts_all_ranks(tmp_path):
    """The restart counts of the agents may then differ."""
    train = (*LONG, "--data.path", str(write_text(tmp_path)))
    run = Run(tmp_path)
    with Agents(tmp_path, *train) as job:
        first, second = job.start(), job.start()
        go_on(job, run, 2)
        os.kill(second.ranks()[0], signal.SIGKILL)
        job.wait_for(lambda: len(run.starts()) == 2)
        stop(job, first, second)
    assert run.starts() == [2, 2]


@pytest.mark.exhaustive
def test_a_node_whose_link_goes_down_and_comes_back_joins_again(tmp_path):
    """Two nodes in network namespaces; the one that serves the rendezvous goes on alone in between."""
    if reason := why_impossible():
        pytest.skip(reason)
    train = (*LONG, "--data.path", str(write_text(tmp_path)), "--comm.timeout-s", "30", "--comm.backend", "gloo")
    run = Run(tmp_path)
    with two_nodes() as nodes, Agents(tmp_path, *train, endpoint=f"{nodes[0].address}:29400") as job:
        agents = [
            job.start(namespace=node.namespace, address=node.address, is_host=n == 0, GLOO_SOCKET_IFNAME=node.interface)
            for n, node in enumerate(nodes)
        ]
        go_on(job, run, 2)
        nodes[1].set_link("down")
        go_on(job, run, 1)
        nodes[1].set_link("up")
        if agents[1].command.process.poll() is not None:  # it gave up; a scheduler would start the node again
            agents[1] = job.start(
                namespace=nodes[1].namespace, address=nodes[1].address, GLOO_SOCKET_IFNAME=nodes[1].interface
            )
        go_on(job, run, 2)
        stop(job, *agents)
    assert run.starts() == [2, 1, 2]
    assert_is_the_uninterrupted_run(run, tmp_path, *train)


# The layouts of a run before and after a restart: number of ranks, and options.
LAYOUTS = {
    **{f"dp {dp}": (dp, {}) for dp in (1, 2, 3, 4)},
    "tp 2": (2, {"mesh__tp": 2}),
    "tp 2 x dp 2": (4, {"mesh__tp": 2}),
    "pp 2": (2, {"mesh__pp": 2}),
    "pp 2 x dp 2": (4, {"mesh__pp": 2}),
    "ZeRO 1, dp 2": (2, {"zero__stage": 1}),
    "ZeRO 1, dp 3": (3, {"zero__stage": 1}),
    "ZeRO 3, dp 2": (2, {"zero__stage": 3}),
    "ZeRO 3, dp 3": (3, {"zero__stage": 3}),
    "ZeRO 3, tp 2 x dp 2": (4, {"zero__stage": 3, "mesh__tp": 2}),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ZeRO 3, dp 3", "tp 2"),
        ("pp 2", "pp 2"),
        *exhaustive(
            *((layout, layout) for layout in LAYOUTS if layout != "pp 2"),
            ("dp 4", "dp 3"),
            ("dp 2", "dp 4"),
            ("tp 2 x dp 2", "tp 2"),
            ("tp 2", "tp 2 x dp 2"),
            ("pp 2 x dp 2", "pp 2"),
            ("pp 2", "pp 2 x dp 2"),
            ("ZeRO 1, dp 3", "ZeRO 1, dp 2"),
            ("ZeRO 3, dp 2", "ZeRO 3, dp 3"),
            ("ZeRO 3, tp 2 x dp 2", "tp 2"),
            ("pp 2 x dp 2", "ZeRO 1, dp 3"),
        ),
    ],
)
def test_losses_after_a_restart_are_those_of_the_uninterrupted_run(ranks, tmp_path, before, after):
    """Bit for bit in the same layout, to 1e-6 in another one, in float32."""
    (ranks_before, options_before), (ranks_after, options_after) = LAYOUTS[before], LAYOUTS[after]
    changes = {"model__num_layers": 2, "train__steps": 20, "optim__lr": 0.1, "checkpoint__every": 4}
    config = small_config(tmp_path / "run", write_text(tmp_path), **changes)
    ranks(train_small, ranks_before, with_changes(config, **options_before), 10)
    ranks(train_small, ranks_after, with_changes(config, **options_after))
    ranks(train_small, ranks_before, with_changes(config, folder=tmp_path / "uninterrupted", **options_before))
    rows, expected = read_curve(tmp_path / "run"), read_curve(tmp_path / "uninterrupted")
    assert [row["start"] for row in read_metrics(tmp_path / "run") if "start" in row] == [0, 10]
    assert len(rows) == len(expected) == 21  # the last row is of the held-out text
    for row, right in zip(rows, expected, strict=True):
        for name in ("loss", "held_out_loss"):
            exact = right.get(name)
            assert row.get(name) == (exact if before == after else pytest.approx(exact, abs=1e-6)), row["step"]
