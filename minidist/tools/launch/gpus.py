"""How many GPUs the ranks of a machine need, and how many they see."""

import os
import sys
from pathlib import Path


def count_gpus() -> int:
    """Count the GPUs that torch can use on this machine."""
    drivers = ("nvidia[0-9]*", "kfd", "dxg")
    if sys.platform == "linux" and not any(file for name in drivers for file in Path("/dev").glob(name)):
        return 0  # without importing torch, which takes seconds
    import torch

    return torch.cuda.device_count()


def has_own_gpu(visible: int) -> bool:
    """Return whether the launcher restricted this rank to one GPU of its own. visible: the number of GPUs it sees.

    Slurm does so with --gpus-per-task=1. torchrun shows every rank all GPUs of the machine, so one is then shared.
    """
    started_by_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return visible == 1 and started_by_launcher and "TORCHELASTIC_RUN_ID" not in os.environ


def format_too_few_gpus_message(ranks: int, visible: int) -> str:
    """Return the message for `--device cuda` where `ranks` ranks would share `visible` GPUs."""
    return (
        f"--device cuda needs one GPU per rank: {ranks} ranks, and torch sees {visible} GPU{'s' * (visible > 1)} here. "
        f"Start {visible} rank{'s' * (visible > 1)}, or give --device cuda:0 to share a GPU, or --device cpu."
    )
