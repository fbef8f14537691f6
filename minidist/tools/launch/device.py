"""Choice of a rank's device and of its communication backend."""

import os
import sys

import torch

import minidist.tools.shm  # noqa: F401  registers the backend "shm" with torch
from minidist.errors import UserError, format_count
from minidist.tools.launch.gpus import format_too_few_gpus_message, has_own_gpu


def choose_device(requested: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device for this rank.

    requested: "cpu", "cuda" (one GPU per rank), "cuda:0" (this GPU for all ranks) or "auto", which means "cuda" if this
    machine has a GPU per rank, else "cpu" (local rank 0 then prints that GPUs are left unused). If the launcher shows
    this process only one GPU (see `has_own_gpu`), that GPU is chosen, whatever the local rank is. local_size: the
    number of ranks on this machine.
    Raises UserError if CUDA is requested and there are too few GPUs.
    """
    if requested == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if requested == "auto" and not gpus:
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"--device {requested}: torch {torch.__version__} sees no GPU here. Give --device cpu.")
    if requested not in ("auto", "cuda"):
        return torch.device(requested)
    if local_size > gpus and has_own_gpu(gpus):
        return torch.device("cuda", 0)
    if local_size > gpus and requested == "cuda":
        raise UserError(format_too_few_gpus_message(local_size, gpus))
    if local_size > gpus:
        if local_rank == 0:
            counts = f"{format_count(local_size, 'rank')} and {format_count(gpus, 'GPU')}"
            print(f"{counts}: running on the CPU", file=sys.stderr, flush=True)
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def choose_backend(requested: str | None, device: torch.device, requested_device: str, size: int) -> str | None:
    """Return the backend for the default process group of `size` ranks; None for no process group.

    requested: "auto", or the backend to return, or None. "auto" means None for one rank, "nccl" if every rank has its
    own GPU, and else "shm" on Linux (it falls back to gloo if the ranks are on several hosts), "gloo" on other systems.
    device: this rank's device. requested_device: the argument of `choose_device`, such as "cuda:0" (all ranks share a
    GPU).
    """
    if requested != "auto":
        return requested
    if size == 1:
        return None
    if device.type == "cuda" and requested_device in ("auto", "cuda"):
        return "nccl"
    return "shm" if sys.platform == "linux" else "gloo"


def prefer_gloo_loopback() -> None:
    """Set GLOO_SOCKET_IFNAME to the loopback interface, unless it is set. All ranks must be on this machine.

    Otherwise gloo resolves the host name, which some machines cannot do.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
