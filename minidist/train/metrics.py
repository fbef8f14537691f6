"""What a log line says: throughput, bytes, memory, and on CUDA how much of the GPU was used."""

import resource
import sys

import torch

# Dense peak of one GPU in FLOP/s, from the makers' data sheets (SXM parts; sparse figures are twice these).
PEAK_FLOPS = {
    "A100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "H100": {"float32": 66.9e12, "bfloat16": 989.4e12, "float16": 989.4e12},
    "H200": {"float32": 66.9e12, "bfloat16": 989.4e12, "float16": 989.4e12},
}
MFU_FORMULA = "flops_per_token(seq_len) * tokens_per_s / (GPUs * peak), flops_per_token = 6 N + 12 l h s"


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense peak of the device in this dtype ("bfloat16"), FLOP/s; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(dtype) for gpu, peaks in PEAK_FLOPS.items() if gpu in name), None)


def mfu(flops_per_token: float, tokens_per_s: float, gpus: int, peak: float) -> float:
    """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B), a fraction."""
    return flops_per_token * tokens_per_s / (gpus * peak)


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank has used so far: torch's allocator on CUDA, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
