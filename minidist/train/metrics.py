"""Metrics for log lines: peak memory, and model FLOPs utilisation on CUDA."""

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch

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


def mfu(flops_per_token: float, tokens_per_s: float, gpus: int, peak: float) -> float:
    """Return the model FLOPs utilisation as a fraction (Chowdhery et al. 2022, appendix B). peak: FLOP/s of one GPU."""
    return flops_per_token * tokens_per_s / (gpus * peak)


class PeakMemory:
    """The peak memory of this rank between two reads, in bytes.

    On CUDA it is that of torch's allocator, on the CPU the process's resident memory. Where the system cannot reset the
    latter (Linux can: `/proc/self/clear_refs`, see proc(5)), it is the peak since the process started.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._reset()

    def read(self) -> int:
        """Return the peak since the last call, or since construction, and reset it."""
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _peak_resident()
        self._reset()
        return peak

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_resident() -> int:
    """Return the peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
