"""Choice of a rank's device and of its communication backend."""

import os
import sys

import torch

import minidist.tools.shm  # noqa: F401  registers the backend "shm" with torch
from minidist.errors import UserError
from minidist.tools.launch.gpus import format_too_few_gpus_message, has_own_gpu


def choose_device(requested: str, local_rank: int, local_size: int) -> torch.device:
    """Choose the device of a rank.

    requested: "cpu"; "cuda" for one GPU per rank; "cuda:0" for this GPU, shared by all ranks; "auto" for "cuda" if this
    machine has a GPU per rank, else "cpu" (the first rank reports that GPUs are left unused). If the launcher shows
    this process only one GPU, that GPU is chosen, whatever the local rank is (`has_own_gpu`).
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
            counts = f"{local_size} ranks and {gpus} GPU{'s' * (gpus > 1)}"
            print(f"{counts}: running on the CPU", file=sys.stderr, flush=True)
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def choose_backend(requested: str | None, device: torch.device, requested_device: str, size: int) -> str | None:
    """Choose the backend of the default process group of `size` ranks; None for no group.

    requested: "auto", the name of a backend, or None; a name or None is returned as it is. device: of this rank.
    requested_device: the argument of `choose_device`; "cuda:0", for example, means that all ranks share a GPU.

    "auto": no group for one rank; nccl if every rank has its own GPU; else shm, which falls back to gloo if the ranks
    are on several hosts; gloo if the system has no shared memory.
    """
    if requested != "auto":
        return requested
    if size == 1:
        return None
    if device.type == "cuda" and requested_device in ("auto", "cuda"):
        return "nccl"
    return "shm" if sys.platform == "linux" else "gloo"


def prefer_gloo_loopback() -> None:
    """Make gloo connect over the loopback interface, unless GLOO_SOCKET_IFNAME names another.

    All ranks must be on this machine. Otherwise gloo resolves the host name, which some machines cannot do.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
