"""Choice of a rank's device and of its communication backend."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import minidist.tools.shm  # noqa: F401  registers the backend "shm" with torch
from minidist.errors import UserError
from minidist.tools.launch.gpus import has_own_gpu, too_few_gpus


def choose_device(asked: str, local_rank: int, local_size: int) -> torch.device:
    """Choose the device of a rank.

    asked: "cpu"; "cuda" for one GPU per rank; "cuda:0" for this GPU, shared by all ranks; "auto" for "cuda" if there
    is a GPU per rank on this machine, else "cpu" (the first rank reports that GPUs are left unused). A process that
    sees one GPU only, its own, takes that one whatever its local rank is (`has_own_gpu`).
    Raises UserError if CUDA is requested and there are too few GPUs.
    """
    if asked == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if asked == "auto" and not gpus:
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"--device {asked}: torch {torch.__version__} sees no GPU here. Give --device cpu.")
    if asked not in ("auto", "cuda"):
        return torch.device(asked)
    if local_size > gpus and has_own_gpu(gpus):
        return torch.device("cuda", 0)
    if local_size > gpus and asked == "cuda":
        raise UserError(too_few_gpus(local_size, gpus))
    if local_size > gpus:
        if local_rank == 0:
            some = f"{local_size} ranks and {gpus} GPU{'s' * (gpus > 1)}"
            print(f"{some}: running on the CPU", file=sys.stderr, flush=True)
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def choose_backend(asked: str | None, device: torch.device, asked_device: str, size: int) -> str | None:
    """Choose the backend of the default process group; None for no group.

    "auto": no group for one rank; nccl if every rank has its own GPU; else shm, which falls back
    to gloo if the ranks are on several hosts; gloo if the system has no shared memory.
    """
    if asked != "auto":
        return asked
    if size == 1:
        return None
    if device.type == "cuda" and asked_device in ("auto", "cuda"):
        return "nccl"
    return "shm" if sys.platform == "linux" else "gloo"


def prefer_loopback() -> None:
    """Make gloo use the loopback interface, which needs no host name, unless the user chose another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def init_group(backend: str, store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Initialize the default process group. timeout_s: of each operation, in seconds."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
