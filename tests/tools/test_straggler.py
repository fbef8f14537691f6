"""Stragglers: the rank for which others wait, by waiting times that are made up or counted by a virtual clock."""

import contextlib

import pytest

from minidist.comm import Meter
from minidist.tools.console.straggler import find_straggler
from minidist.tools.launch.run import make_observers_and_meter
from minidist.train.trainer import Trainer
from tests.helpers.small_run import Stop, read_metrics, small_config, write_text


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        ([0.5, 0.1, 0.5, 0.6], (1, 0.4)),
        ([0.0, 0.9], (0, 0.9)),
        ([0.3, 0.3, 0.3], None),
        ([0.3, 0.1, 0.3], None),  # 0.2 of a step of 1 s
        ([0.9, 0.1, 0.1], None),  # one fast rank makes no slow one
        ([0.0], None),
    ],
)
def test_the_straggler_waits_least_and_by_a_margin(waited_s, expected):
    found = find_straggler(waited_s, 1.0, 0.25)
    assert found == (expected and pytest.approx(expected))
    assert find_straggler(waited_s, 1.0, 0.0) is None


class VirtualMeter(Meter):
    """A meter by whose clock every wait takes 100 s, or none at all on the slow rank."""

    def __init__(self, is_slow):
        super().__init__(keep=False)
        self.is_slow = is_slow

    def add_wait(self, seconds):
        self.waited_s += 0.0 if self.is_slow else 100.0


def train_with_straggler(world, config, slow_rank):
    observers, _ = make_observers_and_meter(config)
    with contextlib.closing(Trainer(world, config, observers, VirtualMeter(world.rank == slow_rank))) as trainer:
        trainer.run(Stop())


@pytest.mark.parametrize("slow_rank", [2, None])
def test_a_slow_rank_is_named_in_the_metrics_and_once_in_a_line(server, tmp_path, slow_rank):
    config = small_config(tmp_path / "run", write_text(tmp_path), train__steps=15, train__log_every=5)
    printed = server.run(train_with_straggler, 3, (config, slow_rank), deadline_s=120).output[0]
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 5, 10, 15]
    named = [row.get("straggler", {}).get("rank") for row in rows]
    assert named == ([None] * 4 if slow_rank is None else [None, None, 2, 2])  # the second row is of four steps
    assert printed.count("rank 2 is a straggler: the others wait ") == (slow_rank == 2)
    assert printed.count("  waits for rank 2\n") == (2 if slow_rank == 2 else 0)
    if slow_rank == 2:
        waits = rows[-1]["straggler"]["excess_s"] / 100  # per step: a whole number, the same in every step
        assert waits == int(waits) >= 1
