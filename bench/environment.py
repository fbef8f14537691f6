"""Descriptions of the machine and the workload, stored with every benchmark result."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.workload import Workload
from minidist.tools.launch import usable_cores

THREADS_PER_RANK = 1


def describe_machine(backend: str = "gloo") -> dict:
    """Return cores, processor, versions, backend and the current time as a JSON-compatible dict."""
    return {
        "cores": usable_cores(),
        "processor": _read_processor_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend,
        "threads_per_rank": THREADS_PER_RANK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _read_processor_name() -> str:
    """Return the processor's name, as Linux reports it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe_workload(work: Workload) -> dict:
    """Return the workload's model, batch size and clipping norm as a JSON-compatible dict."""
    return {
        "parameters": work.model.num_parameters(),
        "global_batch": work.global_batch,
        "seq_len": work.seq_len,
        "clip_norm": work.clip_norm,
        "model": asdict(work.model),
    }
