"""Metrics of log lines: loss, throughput, bytes sent, peak memory, and model FLOPs utilisation on CUDA."""

import contextlib
import math
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minidist.learning_rate import learning_rate
from minidist.precision.policy import TORCH_NAMES, resolve_policy
from minidist.tools.console.straggler import StragglerDetector
from minidist.tools.estimate.flops import flops_per_token
from minidist.train.step_result import StepResult
from minidist.train.trainer import Trainer

# Dense peak of one GPU in FLOP/s, from the makers' data sheets (SXM parts; sparse figures are twice these).
PEAK_FLOPS = {
    "A100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "H100": {"float32": 66.9e12, "bfloat16": 989.4e12, "float16": 989.4e12},
    "H200": {"float32": 66.9e12, "bfloat16": 989.4e12, "float16": 989.4e12},
}
MFU_FORMULA = "flops_per_token(seq_len) * tokens_per_s / (GPUs * peak), flops_per_token = 6 N + 12 l h s"


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the device's dense peak FLOP/s in a dtype (as "bfloat16"); None on CPU and for GPUs not in PEAK_FLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(dtype) for gpu, peaks in PEAK_FLOPS.items() if gpu in name), None)


def mfu(flops_per_token: float, tokens_per_s: float, num_gpus: int, gpu_peak_flops: float) -> float:
    """Return the model FLOPs utilisation as a fraction (Chowdhery et al. 2022, appendix B).

    flops_per_token: model FLOPs of forward and backward. tokens_per_s: tokens per second of all GPUs together.
    gpu_peak_flops: peak FLOP/s of one GPU.
    """
    return flops_per_token * tokens_per_s / (num_gpus * gpu_peak_flops)


class PeakMemory:
    """Measures the peak memory of this rank, in bytes, between two calls of `read_and_reset`.

    On CUDA it is the peak of torch's allocator, on the CPU the peak of the process's resident memory. Where the system
    cannot reset the peak of resident memory (Linux can: `/proc/self/clear_refs`, see proc(5)), it is the peak since the
    process started.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._reset_peak()

    def read_and_reset(self) -> int:
        """Return the peak memory in bytes since the last call, or since construction; then reset the peak."""
        peak = (
            torch.cuda.max_memory_allocated(self._device)
            if self._device.type == "cuda"
            else _read_peak_resident_bytes()
        )
        self._reset_peak()
        return peak

    def _reset_peak(self) -> None:
        """Make the present memory the peak, where the system can do that."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _read_peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StepMetrics:
    """Measures the steps of a run on one rank, and computes the rows of metrics.jsonl with the other ranks."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._peak_memory = PeakMemory(trainer.world.device)
        self._steps, self._seconds, self._sent = 0, 0.0, 0
        self._waited_s: list[float] = []  # in each step since the last row
        self._stragglers = StragglerDetector(trainer.config.train.straggler_threshold)

    @contextlib.contextmanager
    def measure_step(self) -> Iterator[None]:
        """Return a context manager around one step, which counts the bytes this rank sends and the seconds it waits."""
        meter = self._trainer.groups.meter
        before, waited_s = meter.total_wire_bytes, meter.waited_s
        yield
        self._sent = meter.total_wire_bytes - before
        self._waited_s.append(meter.waited_s - waited_s)

    def add_step(self, result: StepResult) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Collective: add the step just done; if a row of metrics is due, return it and each rank's metrics, else None.

        A row is due every `train.log_every` steps, and after the first and the last. Its step time (seconds), memory
        (peak bytes) and comm_bytes (sent by one rank in the last step) are the largest values of all ranks. Step time
        is a mean over the steps since the last row. The second result is a list of dicts, by rank: step_time_s,
        comm_bytes, memory and waited_s (a list, by step). With asynchronous workers both are of this rank alone.
        """
        trainer, step = self._trainer, self._trainer.progress.step
        config, train, scaler = trainer.config, trainer.config.train, trainer.engine.scaler
        self._steps, self._seconds = self._steps + 1, self._seconds + trainer.step_time_s
        if step % train.log_every and step not in (1, train.steps):
            return None
        mine = {
            "step_time_s": self._seconds / self._steps,
            "comm_bytes": self._sent,
            "memory": self._peak_memory.read_and_reset(),
        }
        mine_and_wait = mine | {"waited_s": self._waited_s}
        self._steps, self._seconds, self._waited_s = 0, 0.0, []
        # Asynchronous workers must not wait for each other here: the row is that of this rank.
        asynchronous = config.consistency.is_asynchronous
        ranks = [mine_and_wait] if asynchronous else trainer.all_gather_object(mine_and_wait)
        row = {"step": step, "tokens": trainer.progress.consumed_samples * config.data.seq_len}
        row["loss"] = None if result.loss is None or not math.isfinite(result.loss) else result.loss
        row["grad_norm"] = result.grad_norm if result.is_finite else None
        row["lr"] = learning_rate(config.optim, step - 1, train.steps)
        if scaler is not None:
            row |= {"loss_scale": scaler.scale, "overflow": result.overflowed}
        if train.max_skipped_steps:
            row |= {"skipped": not result.is_finite and not result.overflowed}
            row |= {"skipped_steps": trainer.skipped_steps.total}
        row |= {name: max(rank[name] for rank in ranks) for name in mine}
        straggler = self._stragglers.add_steps([rank["waited_s"] for rank in ranks], row["step_time_s"])
        if straggler:
            row["straggler"] = straggler._asdict()
        row["tokens_per_s"] = train.global_batch * config.data.seq_len / row["step_time_s"]
        if peak := peak_flops(trainer.world.device, TORCH_NAMES[resolve_policy(config.precision).compute]):
            gpus = 1 if config.device.startswith("cuda:") else trainer.world.size
            row["mfu"] = mfu(flops_per_token(config.model, config.data.seq_len), row["tokens_per_s"], gpus, peak)
            row["mfu_formula"] = MFU_FORMULA
        return row, ranks
