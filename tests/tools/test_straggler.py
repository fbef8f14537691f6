"""Stragglers: the rank for which others wait, by waiting times that are made up or counted by a virtual clock."""

import contextlib

import pytest

from minidist.comm import Meter
from minidist.tools.console.straggler import StragglerDetector, find_straggler
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
    steps = [[seconds] * 5 for seconds in waited_s]
    found = find_straggler(steps, 1.0, 0.25)
    assert found == (expected and pytest.approx(expected))
    assert find_straggler(steps, 1.0, 0.0) is None
    assert find_straggler([seconds[:4] for seconds in steps], 1.0, 0.25) is None


def test_an_excess_that_varies_must_be_significant():
    """Both means are 0.36 of a step; two standard errors are 0.05 and 0.21."""
    steady, chance = [0.3, 0.4, 0.3, 0.4, 0.4], [0.1, 0.7, 0.3, 0.5, 0.2]
    assert sum(steady) == pytest.approx(sum(chance))
    assert find_straggler([[0.0] * 5, steady], 1.0, 0.25) == (0, pytest.approx(0.36))
    assert find_straggler([[0.0] * 5, chance], 1.0, 0.25) is None


def test_a_straggler_is_named_once_it_has_cost_a_second_without_a_break():
    """By 9 ms in each step of 30 ms, as on a busy machine: 0.09 s in ten steps."""

    def add(rank, excess_s, times=1):
        waited_s = [[0.0] * 10 if other == rank else [excess_s] * 10 for other in range(2)]
        return [detector.add_steps(waited_s, 0.03) for _ in range(times)]

    detector = StragglerDetector(0.25)
    assert add(1, 0.009, 11) == [None] * 11
    assert add(1, 0.009) == [(1, pytest.approx(0.009))]
    assert add(0, 0.009) == [None], "another rank begins anew"
    assert add(1, 0.009) == [None]
    assert add(1, 0.1) == [(1, pytest.approx(0.1))]
    assert add(1, 0.001) == [None]
    assert add(1, 0.009) == [None]


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
