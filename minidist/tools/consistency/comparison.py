"""Measure one synchronization mode: its training runs, on live ranks or in simulated time, and its simulated time.

`command` compares several modes. All ranks hold a full replica of the model: the mesh has data parallelism only.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minidist.comm import Meter, World
from minidist.config import Config
from minidist.simple.consistency import Server, asynchronous_worker
from minidist.tools.consistency.clock import COMPUTING, MESSAGE, WAITING, Durations, run_on_virtual_clock
from minidist.tools.consistency.comparison_options import Mode
from minidist.tools.consistency.drift import rms_distance_from_mean
from minidist.tools.consistency.rounds import simulate_rounds
from minidist.tools.consistency.virtual_run import train_on_virtual_clock
from minidist.tools.estimate.estimate import estimate
from minidist.tools.launch import RankServer
from minidist.tools.simulate.failures import Phase
from minidist.train.observer import Observer
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer, train

PRELOAD = ("torch._dynamo", "safetensors.torch", __name__)


@dataclass
class Measurement:
    """The measured cost and final loss of one mode. Bytes and times are those of training steps, without evaluation.

    held_out_losses: in nats per token, by seed. sent_bytes: by rank, counted on live ranks, modelled in simulated runs.
    expected_bytes: by rank, modelled by `minidist estimate`; None in simulated runs. phases: by rank, its activities in
    simulated time. step_s, waited_s: on live ranks, the mean duration of a step and of its waits, over all ranks and
    seeds. drifts: by seed, the replicas' `rms_distance_from_mean` after h - 1 local steps of every round, or the same
    measure of the parameters that the asynchronous workers compute with. staleness: number of updates by their
    staleness, over all seeds; empty on live ranks.
    """

    mode: Mode
    held_out_losses: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    expected_bytes: list[int] | None = None
    phases: list[list[Phase]] = field(default_factory=list)
    step_s: float = 0.0
    waited_s: float = 0.0
    drifts: list[list[float]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)


def measure_mode(
    mode: Mode, durations: Durations, bytes_per_s: float, seeds: int, server: RankServer, folder: Path
) -> Measurement:
    """Train in one synchronization mode, once per seed; return its cost and held-out losses.

    durations: the simulated seconds of each rank's step; the durations of messages are replaced by the
    messages' bytes over bytes_per_s. The asynchronous modes have their server on rank `consistency.server`. seeds: the
    number of seeds, from `train.seed` on. folder: for temporary files.
    """
    measurement, ranks = Measurement(mode), len(durations.compute_s)
    durations = with_message_times(durations, mode.config, bytes_per_s)
    steps_s: list[float] = []
    waits_s: list[float] = []
    for seed in range(mode.config.train.seed, mode.config.train.seed + seeds):
        config = dataclasses.replace(mode.config, train=dataclasses.replace(mode.config.train, seed=seed))
        if mode.on_virtual_clock:
            _measure_virtual_run(measurement, config, durations, server)
            config = _with_consistency(config, **mode.live_changes)
        records = run_on_live_ranks(config, ranks, server, folder)
        steps_s += [record["step_s"] for record in records]
        waits_s += [record["waited_s"] for record in records]
        if not mode.on_virtual_clock:
            measurement.held_out_losses.append(records[0]["held_out_loss"])
            measurement.sent_bytes = [record["sent_bytes"] for record in records]
            measurement.drifts.append(records[0]["drifts"])
    measurement.step_s, measurement.waited_s = sum(steps_s) / len(steps_s), sum(waits_s) / len(waits_s)
    if not mode.on_virtual_clock:
        measurement.expected_bytes = modelled_sent_bytes(mode.config, ranks)
        measurement.phases = simulate_phases(mode.config, durations, bytes_per_s)
    return measurement


def run_on_live_ranks(config: Config, ranks: int, server: RankServer, folder: Path) -> list[dict]:
    """Train once; return what `train_and_record` returns, by rank. folder: for the run, which is then deleted."""
    config = dataclasses.replace(config, folder=folder / "run")
    records = server.run(train_and_record, ranks, (config,)).values
    shutil.rmtree(config.folder)
    return records


def _measure_virtual_run(measurement: Measurement, config: Config, durations: Durations, server: RankServer) -> None:
    """Train with asynchronous workers in simulated time, in one process; add the results to `measurement`."""
    arguments = config, durations, measurement.mode.bound
    result = server.run(_train_virtually, 1, arguments, backend=None, threads=1).values[0]
    measurement.held_out_losses.append(result["held_out_loss"])
    measurement.drifts.append(result["drifts"])
    measurement.staleness.update(result["staleness"])
    measurement.phases = result["phases"]
    ranks, at = len(durations.compute_s), config.consistency.server
    message, steps = _message_bytes(config), config.train.steps
    measurement.sent_bytes = [steps * message * (ranks - 1 if rank == at else 1) for rank in range(ranks)]


def _train_virtually(_world: World, config: Config, durations: Durations, bound: int | None) -> dict:
    """Train with asynchronous workers in this process; return the results that another process needs."""
    torch.manual_seed(config.train.seed)  # of dropout
    run = train_on_virtual_clock(config, durations, bound, measure_drift=True)
    return {
        "held_out_loss": run.held_out_loss,
        "drifts": run.drifts,
        "staleness": run.staleness,
        "phases": run.timeline.phases,
    }


def train_and_record(world: World, config: Config) -> dict:
    """Collective: train on live ranks; return the held-out loss and the totals of `StepRecorder`."""
    recorder = StepRecorder()
    summary = train(world, config, [recorder], Meter(keep=False))
    return {"held_out_loss": summary["held_out_loss"], **recorder.totals()}


class StepRecorder(Observer):
    """Observer that totals the bytes and times of one rank's training steps, and measures the drift of the replicas.

    Evaluation and checkpoints are not in the totals: both follow a step's `on_step`.
    """

    def __init__(self):
        self.sent_bytes, self.drifts = 0, list[float]()
        self._steps, self._step_s, self._waited_s = 0, 0.0, 0.0
        self._before = 0, 0.0

    def before_step(self, trainer: Trainer) -> None:
        """Note the bytes sent and the time waited so far."""
        meter = trainer.groups.meter
        self._before = meter.total_wire_bytes, meter.waited_s

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Collective: add the bytes and times of the step; before a synchronization, measure the drift."""
        meter, config = trainer.groups.meter, trainer.config
        self.sent_bytes += meter.total_wire_bytes - self._before[0]
        self._waited_s += meter.waited_s - self._before[1]
        self._steps, self._step_s = self._steps + 1, self._step_s + trainer.step_time_s
        every = config.consistency.h if config.consistency.merges_replicas else config.train.steps
        last_before_merge = (trainer.progress.step + (every > 1)) % every == 0
        if last_before_merge and trainer.world.size > 1 and not config.consistency.is_asynchronous:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in trainer.engine.parameters.values()])
            self.drifts.append(rms_distance_from_mean(flat.float(), trainer.control))

    def totals(self) -> dict:
        """Return the bytes sent in all steps, the mean seconds of a step and of its waits, and the drift by round."""
        return {
            "sent_bytes": self.sent_bytes,
            "step_s": self._step_s / self._steps,
            "waited_s": self._waited_s / self._steps,
            "drifts": self.drifts,
        }


def modelled_sent_bytes(config: Config, ranks: int) -> list[int]:
    """Return the bytes that each rank sends in all steps of a run, averaging included, by `minidist estimate`."""
    steps, how = config.train.steps, config.consistency
    merges = steps // how.h if how.merges_replicas else 0
    costs = estimate(config, ranks).ranks
    if how.mode != "gossip" or not merges:
        return [steps * sum(c.wire_bytes.values()) + merges * sum(c.replica_merge_bytes.values()) for c in costs]
    last = estimate(_with_consistency(config, mode="local"), ranks).ranks  # gossip ends with an all-reduce
    pairs = zip(costs, last, strict=True)
    return [
        steps * sum(c.wire_bytes.values())
        + (merges - 1) * sum(c.replica_merge_bytes.values())
        + sum(end.replica_merge_bytes.values())
        for c, end in pairs
    ]


def _with_consistency(config: Config, **changes) -> Config:
    """Return `config` with changed options of the section `consistency`."""
    return dataclasses.replace(config, consistency=dataclasses.replace(config.consistency, **changes))


def _message_bytes(config: Config) -> int:
    """Return the bytes of a message that holds all parameters or all gradients."""
    return config.model.num_parameters() * (8 if config.precision.policy == "fp64" else 4)


def with_message_times(durations: Durations, config: Config, bytes_per_s: float) -> Durations:
    """Return `durations` for workers of a server on rank `consistency.server`, with one link for all messages.

    bytes_per_s: the bandwidth of the link. A message holds all parameters, or all gradients; the messages of the
    server's own worker take no time.
    """
    transfer_s = [_message_bytes(config) / bytes_per_s] * len(durations.compute_s)
    transfer_s[config.consistency.server] = 0.0
    return dataclasses.replace(durations, transfer_s=transfer_s, shared_link=True)


def simulate_phases(config: Config, durations: Durations, bytes_per_s: float) -> list[list[Phase]]:
    """Return the phases of each rank in simulated time, for any mode but asynchronous and stale.

    config: `config.consistency.mode` is the mode. durations: of the ranks' computation. bytes_per_s: at which each rank
    sends. A collective takes the bytes that its busiest rank sends over bytes_per_s. Mode central is simulated as
    asynchronous workers with staleness bound 0, which is the same exchange. Latency is not modelled.
    """
    ranks, steps, how = len(durations.compute_s), config.train.steps, config.consistency
    if how.mode == "central":
        server = Server(torch.zeros(1), lambda parameters, gradient: None, ranks, bound=0)
        workers = [asynchronous_worker(lambda values, step: values, steps) for _ in range(ranks)]
        return run_on_virtual_clock(server, workers, durations).phases
    compute_s = [[durations.duration_s(0, rank, step) for step in range(steps)] for rank in range(ranks)]
    costs = estimate(config, ranks).ranks
    merge_s = max(sum(cost.replica_merge_bytes.values()) for cost in costs) / bytes_per_s
    if how.mode == "gossip":
        last = estimate(_with_consistency(config, mode="local"), ranks).ranks
        end_s = max(sum(cost.replica_merge_bytes.values()) for cost in last) / bytes_per_s
        return _simulate_ring_rounds(compute_s, merge_s, end_s, how.h)
    if how.merges_replicas:
        return simulate_rounds(compute_s, merge_s, how.h)
    return simulate_rounds(compute_s, max(sum(cost.wire_bytes.values()) for cost in costs) / bytes_per_s, 1)


def _simulate_ring_rounds(
    compute_s: Sequence[Sequence[float]], message_s: float, last_s: float, h: int
) -> list[list[Phase]]:
    """Return the phases of each rank under gossip on a ring: a rank waits for its two neighbours only.

    h: steps per round. After the last step all ranks wait for each other; that message takes `last_s`.
    """
    ranks, steps = len(compute_s), len(compute_s[0])
    phases: list[list[Phase]] = [[] for _ in compute_s]
    starts_s = [0.0] * ranks
    for first in range(0, steps, h):
        ends_s = [start + sum(own[first : first + h]) for start, own in zip(starts_s, compute_s, strict=True)]
        is_last = first + h >= steps
        ready_s = [
            max(ends_s if is_last else [ends_s[at - 1], ends_s[at], ends_s[(at + 1) % ranks]]) for at in range(ranks)
        ]
        for rank, (start_s, end_s, ready) in enumerate(zip(starts_s, ends_s, ready_s, strict=True)):
            done_s = ready + (last_s if is_last else message_s)
            parts = ((COMPUTING, start_s, end_s), (WAITING, end_s, ready), (MESSAGE, ready, done_s))
            phases[rank] += [Phase(*part) for part in parts if part[2] > part[1]]
            starts_s[rank] = done_s
    return phases


def mean_seconds_in_phase(phases: Sequence[Sequence[Phase]], kind: str) -> float:
    """Return the mean over the ranks of the seconds that a rank spends in phases of this kind."""
    return sum(phase.stop - phase.start for own in phases for phase in own if phase.kind == kind) / len(phases)


def end_of_phases(phases: Sequence[Sequence[Phase]]) -> float:
    """Return the simulated time at which the last rank ends."""
    return max(own[-1].stop for own in phases)
