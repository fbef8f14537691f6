"""Creates the process group that torch itself would create, for the backends that wrap one."""

from datetime import timedelta

import torch
import torch.distributed as dist


def create_torch_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group of torch's own backends: gloo for CPU tensors, nccl for CUDA tensors if there is a GPU.

    store: the rendezvous store of the group's ranks. rank: this rank's index in the group. timeout: the limit of each
    operation.
    """
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout=timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group
