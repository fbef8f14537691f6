"""Tensors on GPUs: which inner process group carries them, nccl or host staging, and how calls get there."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.tools.shm.host_staging import HostStagedGroup

# nccl reads it when it makes a communicator, in src/init.cc from 2.30 on
SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_NCCL = (2, 30)


def describe_local_gpu() -> dict:
    """Describe this rank's current GPU and nccl, for the decision that `make_gpu_group` makes.

    Keys: "gpu": the GPU's UUID. "nccl": the version of the loaded library as a list of integers (torch may have been
    built with another), [] without nccl. "off": whether NCCL_MULTI_RANK_GPU_ENABLE=0 forbids ranks to share a GPU.
    """
    there = dist.is_nccl_available()
    return {
        "gpu": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
        "nccl": list(torch.cuda.nccl.version()) if there else [],
        "off": os.environ.get(SHARED_GPU_VARIABLE) == "0",
    }


def make_gpu_group(
    gpu_infos: Sequence[Mapping], rank: int, cpu_group: dist.ProcessGroup, make_nccl: Callable[[], dist.ProcessGroup]
) -> "dist.ProcessGroup | HostStagedGroup":
    """Create the process group for GPU tensors: nccl, or a `HostStagedGroup` where nccl cannot run. Collective.

    nccl cannot run if it is missing, or if ranks share a GPU and this version of nccl or the environment forbids that.
    A `HostStagedGroup` copies tensors through host memory; rank 0 then prints the reason.
    gpu_infos: the `describe_local_gpu()` of every group rank, so that all ranks decide alike. rank: this rank's group
    rank. cpu_group: transfers the host copies. make_nccl: a function without arguments that returns the nccl group.
    """
    oldest = min(tuple(info["nccl"]) for info in gpu_infos)
    shared = len({info["gpu"] for info in gpu_infos}) < len(gpu_infos)
    if oldest and not shared:
        return make_nccl()
    if oldest[:2] >= _FIRST_NCCL and not any(info["off"] for info in gpu_infos):
        os.environ[SHARED_GPU_VARIABLE] = "1"
        return make_nccl()
    if rank == 0:
        staged = "tensors are staged through pinned host memory"
        print(f"backend shm: {_explain_host_staging(oldest)}; {staged}", file=sys.stderr, flush=True)
    return HostStagedGroup(cpu_group)


def _explain_host_staging(oldest: tuple[int, ...]) -> str:
    """Return why nccl cannot run. oldest: the oldest version of nccl on any rank, () without nccl."""
    if not oldest:
        return "the ranks have GPUs and no nccl"
    version = ".".join(map(str, oldest))
    if oldest[:2] >= _FIRST_NCCL:
        return f"the ranks share a GPU, and {SHARED_GPU_VARIABLE}=0 forbids that to nccl {version}"
    return (
        f"the ranks share a GPU, which nccl {version} refuses ({_FIRST_NCCL[0]}.{_FIRST_NCCL[1]} is the first that can)"
    )


def route_by_device(*names_in_torch_2_11: str):
    """Decorate a method of `ShmGroup`: pass calls with a GPU tensor on to the same method of `get_cuda_group()`.

    names_in_torch_2_11: other names of that method in torch 2.11, tried if the CUDA group lacks the new name.
    """

    def wrap(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            tensor = _find_first_tensor(args)
            if tensor is None or not is_on_gpu(tensor):
                return method(self, *args, **kwargs)
            cuda = self.get_cuda_group()
            name = next(name for name in (method.__name__, *names_in_torch_2_11) if hasattr(cuda, name))
            return getattr(cuda, name)(*args, **kwargs)

        return call

    return wrap


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether the tensor is on a GPU. Tests replace this function in order to run without a GPU."""
    return tensor.is_cuda


def _find_first_tensor(args) -> Tensor | None:
    """Return the first tensor among arguments and in lists and tuples in them; None if there is none."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
        if isinstance(arg, (list, tuple)) and (found := _find_first_tensor(arg)) is not None:
            return found
    return None
