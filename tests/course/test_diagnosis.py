"""How a check decides that the ranks of an answer hang, on a clock that the test moves."""

from types import SimpleNamespace

import pytest

from exercises import diagnosis

_PID = 7


class SilentJob:
    """A job of one rank that makes no progress; it ends by itself after 100 polls, each of which takes a second."""

    pids = (_PID,)

    def __init__(self):
        self.seconds = 0
        self.was_killed = False

    def poll(self, _) -> bool:
        self.seconds += 1
        return self.seconds == 100

    def output(self, rank) -> str:
        return ""

    def status_snapshots(self) -> list:
        return [SimpleNamespace(state="running")]

    def dump_stacks(self) -> dict:
        return {}

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def watch(monkeypatch):
    """`watch(queued)`: watch a `SilentJob` whose rank waits for a processor for the share `queued` of the time."""

    def run(queued: float):
        job = SilentJob()
        monkeypatch.setattr(diagnosis.time, "monotonic", lambda: float(job.seconds))
        monkeypatch.setattr(diagnosis, "_read_processor_s", lambda pid: 0.0)
        monkeypatch.setattr(diagnosis, "_read_queued_s", lambda pid: queued * job.seconds)
        monkeypatch.setattr(diagnosis, "_read_running_call", lambda run, rank: ("test_sums", "add(1)"))
        request = SimpleNamespace(answer="answer.py")
        return diagnosis._watch_job(job, SimpleNamespace(request=request, answer=b""), 1, 5.0), job

    return run


def test_a_rank_that_sleeps_is_reported_as_hanging(watch):
    finding, job = watch(queued=0.0)
    assert finding.kind == "hang" and job.was_killed and job.seconds <= 22


def test_a_rank_that_waits_for_a_processor_is_not_reported_as_hanging(watch):
    finding, job = watch(queued=0.9)
    assert finding is None and not job.was_killed
