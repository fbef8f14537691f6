"""`--trace FILE`: records some steps on every rank; rank 0 writes them as one file.

The run's meter records times during those steps (`timed_meter`); then the ranks' recordings are gathered and the file
is written atomically. A run that is stopped writes the steps that it finished; one that fails before the end of the
recording leaves no file.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minidist.comm import Group, all_gather_object
from minidist.config import Config
from minidist.tools.output_files import check_trace_file, write_atomically
from minidist.tools.trace.chrome import make_trace_events
from minidist.tools.trace.clock import DeviceClock, HostClock, measure_clock_offset
from minidist.tools.trace.intervals import covered_time, intersect_intervals
from minidist.tools.trace.timed_meter import RankRecording
from minidist.tools.trace.traffic import traffic_matrix
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer

COMPUTED = ("forward", "backward", "gradient norm", "optimizer")
_PRINTED_RANKS = 8  # in the summary line; the file has all


@dataclass(frozen=True)
class TimeFractions:
    """How one rank spent its recorded time, as fractions; compute, exposed_communication and other add up to 1.

    compute: forward, backward, gradient norm and optimizer, without the waits inside them. exposed_communication: waits
    for communication. other: the rest, such as data, checkpoints and evaluations. hidden_communication: the fraction of
    the time with operations in flight during which the rank computed; None without operations. Time in flight includes
    waiting for the last rank to launch the operation.
    """

    compute: float
    exposed_communication: float
    other: float
    hidden_communication: float | None


def compute_time_fractions(recording: RankRecording) -> TimeFractions:
    """Return which fractions of its recorded time a rank computed, waited for communication, and did anything else."""
    duration = recording.end - recording.begin
    computations = [(span.begin, span.end) for span in recording.spans if span.name in COMPUTED]
    waits = [(wait.begin, wait.end) for wait in recording.waits]
    operations = [
        (op.launched, recording.end if op.completion_time is None else op.completion_time)
        for op in recording.operations
    ]
    exposed, in_flight = covered_time(waits), covered_time(operations)
    compute = covered_time(computations) - covered_time(intersect_intervals(computations, waits))
    overlap = intersect_intervals(computations, operations)
    hidden = (
        (covered_time(overlap) - covered_time(intersect_intervals(overlap, waits))) / in_flight if in_flight else None
    )
    return TimeFractions(compute / duration, exposed / duration, 1 - (compute + exposed) / duration, hidden)


class TraceRecorder(Observer):
    """Observer of a run that records the configured steps on every rank; rank 0 writes them as a Chrome trace file.

    The run's meter (`trainer.groups.meter`) must be a `TimedMeter`. summary_line: the line that `on_end` sends, on rank
    0 about the file; on other ranks None, unless the run ended before the first step to record.
    """

    def __init__(self, config: Config):
        self._whole_config, self._config = config, config.trace
        self._first: int | None = None  # steps done when the recording began
        self._ended = False
        self.summary_line: str | None = None

    def check_folder(self, folder: Path) -> None:
        """Raise UserError if the file of `--trace` exists or cannot be written. folder: unused."""
        check_trace_file(self._whole_config)

    def on_start(self, trainer: Trainer) -> None:
        """Remember the run's meter, which records, and its control group, over which rank 0 gathers the recordings."""
        self._meter, self._group = trainer.groups.meter, trainer.control

    def before_step(self, trainer: Trainer) -> None:
        """Begin the recording before step `--trace.first`; end it `--trace.steps` steps later and write the file.

        Does nothing before other steps. Collective.
        """
        step = trainer.progress.step
        if self._ended:
            return
        if self._first is None:
            if step + 1 >= (self._config.first or 0):
                self._begin(step)
        elif step >= self._first + self._config.steps:
            self._finish(step)

    def on_last_step(self, trainer: Trainer) -> None:
        """End the recording if it still runs, and gather the recordings; rank 0 writes the file. Collective."""
        if not self._ended:
            self._finish(trainer.progress.step)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Send `summary_line` as a note to all observers (the console prints it). Does nothing if it is None."""
        if self.summary_line is not None:
            trainer.send_note(self.summary_line)

    def _finish(self, step: int) -> None:
        """End the recording after `step` steps and gather it; rank 0 writes the file. Collective."""
        self._ended = True
        if self._first is None:
            self.summary_line = f"no trace: the run ended after step {step}, before --trace.first {self._config.first}"
            return
        recording = self._meter.stop_recording(self._clock.offset_ns)
        # The recording ends before this gather, so it does not contain it.
        gathered = all_gather_object((recording, self._clock, self._group.world.node_rank), self._group)
        if self._group.rank == 0:
            self.summary_line = _write(self._config.file, self._group, gathered, (self._first + 1, step))

    def _begin(self, step: int) -> None:
        """Begin the recording before step `step`, and measure the offset of this rank's clock. Collective."""
        self._first = step
        self._clock = measure_clock_offset(self._group)  # now, not at the start of the run: clocks drift
        self._meter.start_recording(DeviceClock() if self._group.world.device.type == "cuda" else HostClock())


def _write(path: Path, group: Group, gathered: Sequence[tuple], steps: tuple[int, int]) -> str:
    """Write the trace file; return the line that describes the trace, or why it could not be written.

    gathered: the recording of every rank. steps: first and last recorded step.
    """
    recordings, clocks, nodes = zip(*gathered, strict=True)
    fractions = [compute_time_fractions(recording) for recording in recordings]
    names = [f"rank {rank} on {group.world.device.type}, node {node}" for rank, node in enumerate(nodes)]
    trace = {
        "traceEvents": make_trace_events(recordings, names),
        "displayTimeUnit": "ms",
        "otherData": {
            "steps": list(steps),
            "recorded_ns": [recording.end - recording.begin for recording in recordings],
            "time_fractions": [asdict(rank_fractions) for rank_fractions in fractions],
            "traffic_bytes": traffic_matrix([[operation.record for operation in r.operations] for r in recordings]),
            "clock_offset_ns": [clock.offset_ns for clock in clocks],
            "clock_error_ns": [clock.error_ns for clock in clocks],
        },
    }
    try:
        write_atomically(path, json.dumps(trace))
    except OSError as error:  # a missing trace should not abort the run
        return f"the trace {path} could not be written: {error.strerror or error}"
    return describe_trace(path, steps, fractions)


def describe_trace(path: Path, steps: tuple[int, int], fractions: Sequence[TimeFractions]) -> str:
    """Return the line to print about a trace: the file, and the time fractions of the first eight ranks.

    path: the trace file. steps: first and last recorded step. fractions: of every rank, in rank order.
    """
    printed = []
    for rank, time in enumerate(fractions[:_PRINTED_RANKS]):
        hidden = time.hidden_communication
        overlap = "" if hidden is None else f" ({hidden:.0%} of communication hidden)"
        printed.append(f"rank {rank} {time.compute:.0%} / {time.exposed_communication:.0%} / {time.other:.0%}{overlap}")
    more = f"; {len(fractions) - len(printed)} more ranks in the file" if len(fractions) > len(printed) else ""
    recorded = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    return (
        f"trace of {recorded}: {path}, for ui.perfetto.dev or chrome://tracing; compute / waiting for communication / "
        f"other: {', '.join(printed)}{more}"
    )
