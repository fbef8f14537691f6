"""The runs of chapter 07: a process dies where it is told to, and phases are joined."""

import multiprocessing
import signal

import pytest

from minidist.comm import World
from minidist.simple import engine as engine_module
from minidist.tools.notebook import small_runs
from minidist.tools.simulate.failures import Phase


@pytest.fixture
def folder(tmp_path):
    small_runs.write_text(tmp_path)
    return tmp_path


def _step_and_save(folder, phase, done):
    trainer = small_runs.make_trainer(folder, World.single())
    engine = trainer.engine
    engine.optimizer.register_step_post_hook(lambda *_: done.send("updated"))
    run_layers, agree = engine.run_layers, engine_module.agree_on_step
    engine_module.agree_on_step = lambda *arguments: (done.send("decided"), agree(*arguments))[1]
    engine.run_layers = lambda *arguments: (done.send("forward"), run_layers(*arguments))[1]
    small_runs.die_in(trainer, phase, lambda: done.send("dies"))
    trainer.step()
    trainer.save()


@pytest.mark.parametrize(
    ("phase", "before"),
    [
        ("forward", []),
        ("backward", ["forward"]),
        ("decision", ["forward"]),
        ("update", ["forward", "decided"]),
        ("save", ["forward", "decided", "updated"]),
    ],
)
def test_a_process_dies_in_the_chosen_phase(folder, phase, before):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_step_and_save, args=(folder, phase, sender))
    process.start()
    sender.close()
    events = []
    with pytest.raises(EOFError):
        while True:
            events.append(receiver.recv())
    process.join()
    assert events == [*before, "dies"] and process.exitcode == -signal.SIGKILL
    assert not (folder / "never saved").exists()


def test_an_unknown_phase_is_refused(folder):
    with pytest.raises(ValueError, match="has no phase 'lunch': it has forward, backward"):
        small_runs.die_in(None, "lunch")


@pytest.mark.parametrize(("moment", "size"), [(0.5, 50), ("before rename", 100), ("never", 100)])
def test_a_save_dies_at_its_moment(tmp_path, moment, size):
    run, name = tmp_path / "run", "new" if moment == "never" else "partial"
    run.mkdir()
    (run / "old").write_bytes(bytes(100))

    def save():
        with open(run / "partial", "wb", buffering=0) as file:
            file.write(bytes(50))
            file.write(bytes(50))
        (run / "partial").rename(run / "new")

    small_runs.save_and_die(save, run, moment)
    assert {file.name for file in run.iterdir()} == {name, "old"}
    assert (run / name).stat().st_size == size


def test_phases_are_joined():
    phases = [Phase("step", 0, 2), Phase("save", 2, 2.1), Phase("step", 2.1, 5), Phase("lost", 5, 6)]
    assert small_runs.join_phases(phases) == phases
    assert small_runs.join_phases(phases, at_least=0.5) == [Phase("step", 0, 5), Phase("lost", 5, 6)]
