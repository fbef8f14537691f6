"""What figures depend on besides the programs: the machine, and what is trained."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.workload import Workload
from minidist.tools.launch import usable_cores

THREADS_PER_RANK = 1


def machine_facts(backend: str = "gloo") -> dict:
    """The machine, the versions, the time."""
    return {
        "cores": usable_cores(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend,
        "threads_per_rank": THREADS_PER_RANK,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def workload_facts(work: Workload) -> dict:
    return {
        "parameters": work.model.num_parameters(),
        "global_batch": work.global_batch,
        "seq_len": work.seq_len,
        "clip_norm": work.clip_norm,
        "model": asdict(work.model),
    }
