"""Goodput: useful and lost time of all attempts of a run add up to its wall time."""

import contextlib
import itertools

import pytest

from minidist.comm import World
from minidist.tools.console.goodput import TimeAccounts
from minidist.tools.console.reporter import RunReporter
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer
from tests.helpers.small_run import (
    Stop,
    read_metrics,
    small_config,
    with_changes,
    with_resume,
    write_text,
)


class Clock:
    """A clock that is 1 s later at every reading."""

    def __init__(self, start_s):
        self.readings = itertools.count(start_s)

    def __call__(self):
        return float(next(self.readings))


class Killed(Exception):
    pass


class KillAfterStep(Observer):
    def __init__(self, step):
        self._step = step

    def on_step(self, trainer, result):
        if trainer.progress.step == self._step:
            raise Killed


def attempt(config, start_s, killed_after=None):
    """Run one attempt whose clock begins at `start_s`; returns its summary, None if it was killed."""
    observers = [RunReporter(Clock(start_s)), KillAfterStep(killed_after)]
    with contextlib.suppress(Killed), contextlib.closing(Trainer(World.single(), config, observers)) as trainer:
        return trainer.run(Stop())
    return None


def seconds(row):
    return row["time"]["useful_s"] + sum(row["time"]["lost"].values())


@pytest.fixture
def config(tmp_path):
    config = small_config(tmp_path / "run", write_text(tmp_path), train__steps=8, train__eval_every=4)
    return with_changes(config, checkpoint__background=False)


def test_useful_and_lost_time_of_all_attempts_is_the_wall_time(config):
    assert attempt(config, 1000, killed_after=2) is None  # before any checkpoint
    assert attempt(config, 2000, killed_after=5) is None  # after that of step 3
    before = read_metrics(config.folder)
    summary = attempt(config, 3000)
    rows = read_metrics(config.folder)
    for row in [*before, *rows]:
        assert seconds(row) == row["time"]["at"] - 1000
        assert row["goodput"] == row["time"]["useful_s"] / seconds(row) if seconds(row) else row["goodput"] == 0
    saved = next(row for row in before if row.get("saved_step") == 3)
    started = [row for row in rows if "start" in row][-1]
    lost = started["time"]["lost"]
    assert started["start"] == 3 and started["time"]["useful_s"] == saved["useful_s"]
    # The steps of the first attempt were lost, too, and so were steps 4 and 5 of the second.
    assert (
        lost["lost steps"]
        == before[-1]["time"]["lost"]["lost steps"] + before[-1]["time"]["useful_s"] - saved["useful_s"]
    )
    assert before[0]["time"]["lost"]["lost steps"] > 0 and {"starting", "resuming", "saving", "evaluation"} <= set(lost)
    assert 1900 < lost["between attempts"] < 2000  # the attempts began 1000 s apart and lasted seconds
    assert rows[-1]["end"] == 8 and summary["goodput"] == rows[-1]["goodput"] < 0.05


def read_records(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_complete_run_that_is_started_again_keeps_its_records(config):
    first = attempt(config, 1000)
    records = read_records(config.folder)
    again = with_changes(config, train__log_every=2)  # which may change
    second = attempt(again, 9000)
    assert read_records(config.folder) == records and {"metrics.jsonl", "config.toml", "loss.png"} <= set(records)
    assert second == first


def test_the_time_since_a_complete_run_ended_is_not_lost_when_it_is_resumed_for_more_steps(config):
    attempt(config, 1000)
    longer = with_changes(config, train__steps=12)
    attempt(with_resume(longer, config.folder), 9000)
    assert seconds(read_metrics(config.folder)[-1]) < 1000


@pytest.mark.parametrize(("is_complete", "lost_s"), [(True, 0.0), (False, 90.0)])
def test_only_an_attempt_that_did_not_complete_the_run_is_followed_by_lost_time(is_complete, lost_s):
    accounts = TimeAccounts(Clock(100))
    time = {"at": 10.0, "step": 8, "useful_s": 6.0, "lost": {}}
    accounts.continue_from([{"end": 8, "complete": is_complete, "goodput": 1.0, "time": time}], 8)
    assert accounts.seconds["between attempts"] == lost_s and accounts.seconds["useful"] == 6.0


def test_a_skipped_step_is_lost_and_a_line_names_the_causes():
    accounts = TimeAccounts(Clock(0))
    accounts.charge("starting")
    accounts.charge("useful", 7.0)
    accounts.charge("skipped steps", 9.0)
    assert accounts.goodput == 6 / 9
    assert (
        accounts.describe() == "goodput 67 %: 6.0 s of useful steps in 9.0 s; lost: skipped steps 2.0 s, starting 1.0 s"
    )


def test_metrics_of_a_version_without_accounts_are_no_attempts():
    accounts = TimeAccounts(Clock(5))
    accounts.continue_from([{"start": 0}, {"step": 1, "loss": 2.0}], 1)
    assert accounts.wall_s == 0.0
