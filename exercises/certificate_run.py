"""The measured training run of the certificate, which torchrun starts on every rank.

`python -m exercises.certificate_run FILE`: FILE is a pickled `MeasuredRun`. Rank 0 writes what was measured beside it.
"""

import contextlib
import json
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exercises.learner_pieces import LearnerPiece
from exercises.torchrun_process import dump_stack_at_deadline, note_step, run_under_torchrun
from exercises.train import bind_control_group, train_and_count
from minidist.comm import Meter, World, all_gather_object
from minidist.comm.meter import Record
from minidist.config import Config
from minidist.errors import RunError
from minidist.tools.cli import parse_train_options, run_to_exit_code
from minidist.tools.launch.start import start
from minidist.tools.launch.torchrun import defer_sigterm, end_rank, read_rank_text
from minidist.tools.memory.breakdown import PeakByKind, make_tensor_lister
from minidist.tools.output_files import write_atomically
from minidist.train.observer import Observer

_MEMORY_STEP = 3  # the step whose peak memory is measured; its time is not
_FIRST_TIMED_STEP = 4
_RUN, _RESULT = "run.pickle", "measured.json"


@dataclass(frozen=True)
class MeasuredRun:
    """A training run under torchrun. argv: options of `minidist train`. pieces: the learner's. end_s: the deadline, in
    Unix time."""

    argv: tuple[str, ...]
    pieces: tuple[LearnerPiece, ...]
    end_s: float


@dataclass
class SplitMeter(Meter):
    """A meter that also counts the bytes of operations whose algorithm is assumed, by `Record.modelled`."""

    modelled_bytes: int = 0

    def record(self, *args: Any, **more: Any) -> Record:
        """Count one launched operation and return its record."""
        record = super().record(*args, **more)
        self.modelled_bytes += record.wire_bytes if record.modelled else 0
        return record


@dataclass
class RunMeasurements(Observer):
    """Observer that measures a run on one rank: losses, seconds, bytes and operations of each step, memory of one.

    meter: the run's. folder: for the notes of `run_under_torchrun`. peak_memory: of this rank's tensors, in bytes.
    """

    meter: SplitMeter
    folder: Path
    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    modelled_bytes: list[int] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    peak_memory: int | None = None

    @contextlib.contextmanager
    def step_context(self, trainer: Any) -> Iterator[None]:
        """Return a context manager that counts the bytes of one step, and in one step measures the peak memory."""
        before = self.meter.total_wire_bytes, self.meter.modelled_bytes, self.meter.operations.total()
        peak = None
        with contextlib.ExitStack() as around:
            if trainer.progress.step + 1 == _MEMORY_STEP:
                tensors = make_tensor_lister(trainer.engine.model, trainer.engine.optimizer)
                peak = around.enter_context(PeakByKind(tensors, trainer.world.device))
            yield
        if peak is not None:
            self.peak_memory = peak.peak.total
        self.bytes_sent.append(self.meter.total_wire_bytes - before[0])
        self.modelled_bytes.append(self.meter.modelled_bytes - before[1])
        self.operations.append(self.meter.operations.total() - before[2])

    def on_step(self, trainer: Any, result: Any) -> None:
        """Keep the loss and the seconds of a step."""
        self.losses.append(result.loss)
        self.step_s.append(trainer.step_time_s)
        note_step(self.folder, trainer.world.rank, trainer.progress.step)

    def summarize(self) -> dict[str, Any]:
        """Return this rank's numbers: bytes and operations of the last step, and times without warm-up."""
        timed = self.step_s[_FIRST_TIMED_STEP - 1 :]
        return {
            "counted_bytes_per_step": self.bytes_sent[-1] - self.modelled_bytes[-1],
            "modelled_bytes_per_step": self.modelled_bytes[-1],
            "operations": self.operations[-1],
            "peak_memory": self.peak_memory,
            "step_s": statistics.median(timed),
            "fastest_step_s": min(timed),
        }


def measure_training(
    argv: Sequence[str], pieces: Sequence[LearnerPiece], ranks: int, folder: Path, deadline_s: float
) -> dict[str, Any]:
    """Train under torchrun with the options `argv` and the pieces; return what was measured (see `_measure_on_rank`).

    folder: a new folder for this run. Raises RunError if the run fails or misses its deadline.
    """
    folder.mkdir()
    run = MeasuredRun((*argv, "--folder", str(folder / "run")), tuple(pieces), time.time() + deadline_s)
    (folder / _RUN).write_bytes(pickle.dumps(run))
    run_under_torchrun("exercises.certificate_run", str(folder / _RUN), ranks, folder, deadline_s)
    if not (folder / _RESULT).exists():
        raise RunError("the run under torchrun ended without a result")
    return json.loads((folder / _RESULT).read_text())


def _measure_on_rank(world: World, config: Config, pieces: Sequence[LearnerPiece], folder: Path) -> dict[str, Any]:
    """Collective: train and measure; rank 0 writes the result. Returns the summary of the run."""
    control, meter = bind_control_group(world), SplitMeter(keep=False)
    measurements = RunMeasurements(meter, folder)
    calls, summary = train_and_count(world, control, config, pieces, [measurements], meter)
    mesh = config.mesh_of(world.size)
    mine = {"rank": world.rank, "coords": mesh.coords(world.rank), **measurements.summarize()}
    by_rank = all_gather_object(mine, control)
    if world.rank == 0 and not summary["stopped"]:
        result = {
            "backend": world.backend,
            "ranks": by_rank,
            "calls": {piece.name: [of_rank.get(piece.name, 0) for of_rank in calls] for piece in pieces},
            "losses": measurements.losses,
            "held_out_loss": summary["held_out_loss"],
            "unigram_loss": summary["unigram"],
            "bigram_loss": summary["bigram"],
        }
        write_atomically(folder / _RESULT, json.dumps(result))
    return summary


def _run(file: Path) -> int:
    """Run the `MeasuredRun` in a file as one of torchrun's ranks; return the exit code."""
    defer_sigterm()
    run: MeasuredRun = pickle.loads(file.read_bytes())
    dump_stack_at_deadline(file.parent, int(read_rank_text()), run.end_s)
    config, _ = parse_train_options(list(run.argv))
    start(config, None, _measure_on_rank, (run.pieces, file.parent))
    return 0


if __name__ == "__main__":
    end_rank(run_to_exit_code(lambda: _run(Path(sys.argv[1])), "certificate"))
