"""Makes a group: the ranks exchange addresses through the store and connect, or fall back to gloo."""

import json
import os
import secrets
import socket
import sys
import time

import torch.distributed as dist

from minidist.tools.shm.barrier import GroupBarrier
from minidist.tools.shm.gpu import describe_local_gpu, make_gpu_group
from minidist.tools.shm.group import ShmGroup
from minidist.tools.shm.group_resources import GroupResources
from minidist.tools.shm.process_context import ProcessContext
from minidist.tools.torch_group import create_torch_group

_ASK_STORE_S = 0.2
_CONTEXT: list[ProcessContext] = []  # the one context of this process, while it has groups


def create_group(options, _backend_options) -> dist.ProcessGroup:
    """Create and return a process group of the backend `shm`; torch calls this on every rank of the group. Collective.

    options: torch's `_DistributedBackendOptions`: the group's store, ranks, timeout and name. _backend_options: unused.
    Returns a gloo group instead if the ranks cannot share memory, because they are on several hosts, belong to several
    users, or do not run on Linux. Rank 0 then prints the reason.
    """
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    domain = _shared_memory_domain()
    infos = _exchange_infos(
        store,
        rank,
        size,
        {"place": domain, "token": _get_process_context().token if domain else "", "group": _make_unique_name()},
    )
    if any(info["place"] != infos[0]["place"] or not info["place"] for info in infos):
        if rank == 0:
            print(
                f"backend shm: {_explain_gloo_fallback(infos)}; these {size} ranks talk over gloo",
                file=sys.stderr,
                flush=True,
            )
        return create_torch_group(store, rank, size, timeout)
    resources = _connect_ranks(infos, ranks, rank, timeout.total_seconds(), options.group_id, store)

    def make_cuda_group(group: ShmGroup):
        infos = _exchange_infos(dist.PrefixStore("gpus/", store), rank, size, describe_local_gpu())
        inner = dist.PrefixStore("inner/", store)
        return make_gpu_group(infos, rank, group, lambda: create_torch_group(inner, rank, size, timeout))

    return ShmGroup(resources, options.group_id, make_cuda_group)


def _get_process_context() -> ProcessContext:
    """Return the context of this process; create it for the first group, and again in a forked child."""
    if not _CONTEXT or _CONTEXT[0].pid != os.getpid():  # a forked child must not use its parent's
        _CONTEXT[:] = [ProcessContext()]
    return _CONTEXT[0]


def _on_group_closed(last: bool) -> None:
    """Forget the context of this process if its last group was closed."""
    if last:
        _CONTEXT.clear()


def _shared_memory_domain() -> str:
    """Return a text that is equal on processes that can share memory; "" where that is impossible."""
    if sys.platform != "linux" or not hasattr(socket, "send_fds"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return ""


def _explain_gloo_fallback(infos: list[dict]) -> str:
    """Return why the ranks cannot share memory, given the information that they have exchanged."""
    if not all(info["place"] for info in infos):
        return "no shared memory between processes on this system"
    return "the ranks are on different hosts, or of different users"


def _make_unique_name() -> str:
    """Return a random name for a group, which no other group has."""
    return secrets.token_hex(8)


def _exchange_infos(store: dist.Store, rank: int, size: int, info: dict) -> list[dict]:
    """Return the `info` of every rank. Each call uses new keys, as a store may outlive the group that it made."""
    turn = (store.add("shm/come", 1) - 1) // size
    keys = [f"shm/{turn}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(info))
    store.wait(keys)
    return [json.loads(store.get(key)) for key in keys]


def _connect_ranks(
    infos: list[dict], ranks: tuple[int, ...], rank: int, timeout_s: float, name: str, store: dist.Store
) -> GroupResources:
    """Connect to every other rank: to lower ranks actively, from higher ranks by waiting for their connection.

    store: asked while this rank waits, because the store of a run whose ranks may die fails then.
    """
    context, group = _get_process_context(), infos[0]["group"]
    socks, pids = [None] * len(infos), [None] * len(infos)
    for other in range(rank):
        try:
            socks[other], pids[other] = context.connect(infos[other]["token"], (group, "meet", rank))
        except OSError as error:
            raise dist.DistBackendError(f"rank {ranks[other]} is not there any more: {error}") from None
    for other in range(rank + 1, len(infos)):
        arrived, end_s = None, time.monotonic() + timeout_s
        while arrived is None:
            if time.monotonic() > end_s:
                raise dist.DistBackendError(
                    f"rank {ranks[other]} did not connect to rank {ranks[rank]} in {timeout_s:g} s"
                )
            store.check(["shm/come"])
            arrived = context.wait_for_connection((group, "meet", other), lambda: True, min(timeout_s, _ASK_STORE_S))
        socks[other], pids[other] = arrived
    barrier = GroupBarrier(context, ranks, rank, socks, name, timeout_s)
    return GroupResources(context, barrier, [info["token"] for info in infos], pids, group, _on_group_closed)
