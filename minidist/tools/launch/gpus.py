"""How many GPUs the ranks of a machine need, and how many they see."""

import os
import sys
from pathlib import Path


def count_gpus() -> int:
    """Return the number of GPUs that torch can use on this machine."""
    drivers = ("nvidia[0-9]*", "kfd", "dxg")
    if sys.platform == "linux" and not any(file for name in drivers for file in Path("/dev").glob(name)):
        return 0  # without importing torch, which takes seconds
    import torch

    return torch.cuda.device_count()


def has_own_gpu(num_visible_gpus: int) -> bool:
    """Return whether the launcher gave this rank one GPU for itself, as Slurm does with --gpus-per-task=1.

    num_visible_gpus: the number of GPUs that torch sees in this process. A single GPU under torchrun is not the rank's
    own: torchrun shows every rank all GPUs of the machine.
    """
    started_by_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return num_visible_gpus == 1 and started_by_launcher and "TORCHELASTIC_RUN_ID" not in os.environ


def format_too_few_gpus_message(ranks: int, num_visible_gpus: int) -> str:
    """Return the error message for `--device cuda` with `ranks` ranks on a machine with fewer GPUs."""
    return (
        f"--device cuda needs one GPU per rank: {ranks} ranks, and torch sees {num_visible_gpus} "
        f"GPU{'s' * (num_visible_gpus > 1)} here. Start {num_visible_gpus} rank{'s' * (num_visible_gpus > 1)}, or give "
        "--device cuda:0 to share a GPU, or --device cpu."
    )
