"""`--trace FILE`: some steps of a run recorded on every rank, and written as one file by rank 0.

The meter keeps times while those steps run (`comm/timed.py`); at their end the ranks' recordings are gathered and
written in one piece: under another name first, then renamed, so that the file is whole or is not there. A run that is
stopped writes the steps it made; one that dies before the last of them leaves no file.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minidist.comm import Group, all_gather_object
from minidist.config import Config
from minidist.tools.output_files import check_trace_file
from minidist.tools.trace.chrome import events
from minidist.tools.trace.clock import DeviceClock, HostClock, offset_from_first
from minidist.tools.trace.intervals import both, length
from minidist.tools.trace.timed_meter import Recording
from minidist.tools.trace.traffic import traffic_matrix
from minidist.train.observer import Observer
from minidist.train.run_folder import write_atomically
from minidist.train.trainer import Trainer

COMPUTED = ("forward", "backward", "gradient norm", "optimizer")
_TOLD_RANKS = 8  # as many have their shares in the line at the end; the file has those of all


@dataclass(frozen=True)
class Shares:
    """Where one rank's time went, as fractions of what was recorded. They add up to 1.

    compute: forward, backward, the gradient's norm and the optimizer, without waits inside them; exposed: it waited for
    communication; other: the rest, such as data, checkpoints and evaluations.
    hidden: of the time in which its operations were in flight (so also until the last rank has joined), the fraction in
    which it computed; None without any.
    """

    compute: float
    exposed: float
    other: float
    hidden: float | None


def shares(recording: Recording) -> Shares:
    """Where the rank's time went."""
    whole = recording.end - recording.begin
    busy = [(span.begin, span.end) for span in recording.spans if span.name in COMPUTED]
    waits = [(wait.begin, wait.end) for wait in recording.waits]
    flights = [(f.launched, recording.end if f.completed is None else f.completed) for f in recording.flights]
    exposed, in_flight = length(waits), length(flights)
    compute = length(busy) - length(both(busy, waits))
    behind = both(busy, flights)
    hidden = (length(behind) - length(both(behind, waits))) / in_flight if in_flight else None
    return Shares(compute / whole, exposed / whole, 1 - (compute + exposed) / whole, hidden)


class Trace(Observer):
    """Records the trace of one run. The run's meter must be a `TimedMeter`.

    line: what rank 0 says about the trace at the end of the run.
    """

    def __init__(self, config: Config):
        self._whole_config, self._config = config, config.trace
        self._first: int | None = None  # steps done when the recording began
        self._ended = False
        self.line: str | None = None

    def check(self) -> None:
        check_trace_file(self._whole_config)

    def on_start(self, trainer: Trainer) -> None:
        self._meter, self._group = trainer.groups.meter, trainer.control

    def before_step(self, trainer: Trainer) -> None:
        """Begin or end the recording if it is time to."""
        step = trainer.progress.step
        if self._ended:
            return
        if self._first is None:
            if step + 1 >= (self._config.first or 0):
                self._begin(step)
        elif step >= self._first + self._config.steps:
            self._finish(step)

    def on_last_step(self, trainer: Trainer) -> None:
        if not self._ended:
            self._finish(trainer.progress.step)

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        if self.line is not None:
            trainer.note(self.line)

    def _finish(self, step: int) -> None:
        """End the recording after `step` steps and write it."""
        self._ended = True
        if self._first is None:
            self.line = f"no trace: the run ended after step {step}, before --trace.first {self._config.first}"
            return
        recording = self._meter.end(self._clock[0])
        # What was recorded ends here: the gathering is not part of it.
        gathered = all_gather_object((recording, self._clock, self._group.world.node_rank), self._group)
        if self._group.rank == 0:
            self.line = _write(self._config.file, self._group, gathered, (self._first + 1, step))

    def _begin(self, step: int) -> None:
        self._first = step
        self._clock = offset_from_first(self._group)  # now, not at the start of the run: clocks drift
        self._meter.begin(DeviceClock() if self._group.world.device.type == "cuda" else HostClock())


def _write(path: Path, group: Group, gathered: Sequence[tuple], steps: tuple[int, int]) -> str:
    """Write the file; returns what to say of it."""
    recordings, clocks, nodes = zip(*gathered, strict=True)
    parts = [shares(recording) for recording in recordings]
    names = [f"rank {rank} on {group.world.device.type}, node {node}" for rank, node in enumerate(nodes)]
    trace = {
        "traceEvents": events(recordings, names),
        "displayTimeUnit": "ms",
        "otherData": {
            "steps": list(steps),
            "recorded_ns": [recording.end - recording.begin for recording in recordings],
            "shares": [asdict(share) for share in parts],
            "traffic_bytes": traffic_matrix([[flight.record for flight in r.flights] for r in recordings]),
            "clock_offset_ns": [offset for offset, _ in clocks],
            "clock_error_ns": [error for _, error in clocks],
        },
    }
    try:
        write_atomically(path, json.dumps(trace))
    except OSError as error:  # not worth the end of a run
        return f"the trace {path} could not be written: {error.strerror or error}"
    return tell(path, steps, parts)


def tell(path: Path, steps: tuple[int, int], parts: Sequence[Shares]) -> str:
    """Where the file is, and of each rank where its time went, in a line."""
    told = [
        f"rank {rank} {part.compute:.0%} / {part.exposed:.0%} / {part.other:.0%}"
        + ("" if part.hidden is None else f" ({part.hidden:.0%} of communication hidden)")
        for rank, part in enumerate(parts[:_TOLD_RANKS])
    ]
    more = f"; {len(parts) - len(told)} more ranks in the file" if len(parts) > len(told) else ""
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    return (
        f"trace of {which}: {path}, for ui.perfetto.dev or chrome://tracing; compute / waiting for communication / "
        f"other: {', '.join(told)}{more}"
    )
