"""The function that every rank of `minidist train` runs: the trainer with the configured observers."""

from collections.abc import Sequence
from typing import Any

from minidist.comm import Meter, World
from minidist.config import Config
from minidist.tools.chaos.faults import parse_fault
from minidist.tools.console.reporter import RunReporter
from minidist.tools.launch.run_folder_guard import RunFolderGuard
from minidist.tools.launch.simple_engine import train_simple
from minidist.tools.memory.tracker import MemoryTracker
from minidist.tools.recovery.live_recovery import train_with_recovery
from minidist.tools.replica_check import ReplicaCheckObserver
from minidist.tools.trace.timed_meter import TimedMeter
from minidist.tools.trace.trace import TraceRecorder
from minidist.train.observer import Observer
from minidist.train.resume import inherit_options
from minidist.train.trainer import train


def train_and_report(
    world: World, config: Config, more_observers: Sequence[Observer] = (), meter: Meter | None = None
) -> dict[str, Any]:
    """Train with the observers that `config` asks for; return the summary of the run. Collective.

    The observers show progress, write metrics, and record a trace and memory if configured. On rank 0 the summary also
    has the held-out losses of a unigram and a bigram model. more_observers: come before these observers. meter: counts
    the bytes in place of the run's own meter. Live recovery uses neither.
    """
    config = inherit_options(config)
    if config.fault.live_recovery:
        return train_with_recovery(world, config, make_observers_and_meter)
    run = train_simple if config.engine == "simple" else train
    observers, own_meter = make_observers_and_meter(config)
    return run(world, config, [*more_observers, *observers], meter or own_meter)


def make_observers_and_meter(config: Config) -> tuple[list[Observer], Meter]:
    """Return the observers that `config` asks for, and the run's meter, which counts the bytes that this rank sends.

    The meter keeps times of single operations only if a trace is recorded, else only totals.
    """
    meter = Meter(keep=False) if config.trace.file is None else TimedMeter()
    observers: list[Observer] = []
    if config.fault.inject is not None and config.engine != "simple":  # which does so itself
        from minidist.tools.chaos.injector import FaultInjector

        observers.append(injector := FaultInjector(parse_fault(config.fault.inject)))
        meter = injector.meter
    if config.fault.digest_every and config.engine != "simple":  # which compares its replicas itself
        observers.append(ReplicaCheckObserver())
    if config.trace.file is not None:
        observers.append(TraceRecorder(config))
    if config.memory.file is not None:
        observers.append(MemoryTracker(config))
    if config.checkpoint.remote is not None:
        from minidist.tools.remote import CheckpointUploader

        observers.append(CheckpointUploader(config.checkpoint))
    return [*observers, RunReporter(), RunFolderGuard(config)], meter
