"""How the ranks of a group find each other, and when they talk over gloo instead."""

import json
import os
import secrets
import socket
import sys

import torch.distributed as dist

from minidist.tools.shm.gpu import gpu_card, gpu_group
from minidist.tools.shm.group import ShmGroup
from minidist.tools.shm.members import Members
from minidist.tools.shm.neighbours import Neighbours
from minidist.tools.shm.rendezvous import Meeting
from minidist.tools.torch_group import create_torch_group

_HERE: list[Neighbours] = []  # what all groups of this process share, while there are any


def create(options, _backend_options) -> dist.ProcessGroup:
    """torch calls this for every new group of the backend, on each of its ranks."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    place = _place()
    cards = _exchange(store, rank, size, {"place": place, "token": _here().token if place else "", "group": _unique()})
    if any(card["place"] != cards[0]["place"] or not card["place"] for card in cards):
        if rank == 0:
            print(f"backend shm: {_reason(cards)}; these {size} ranks talk over gloo", file=sys.stderr, flush=True)
        return create_torch_group(store, rank, size, timeout)
    members = _meet(cards, ranks, rank, timeout.total_seconds(), options.group_id)

    def gpus(group: ShmGroup):
        cards = _exchange(dist.PrefixStore("gpus/", store), rank, size, gpu_card())
        inner = dist.PrefixStore("inner/", store)
        return gpu_group(cards, rank, group, lambda: create_torch_group(inner, rank, size, timeout))

    return ShmGroup(members, options.group_id, gpus)


def _here() -> Neighbours:
    if not _HERE or _HERE[0].pid != os.getpid():  # a forked child has copies of nothing but names
        _HERE[:] = [Neighbours()]
    return _HERE[0]


def _left(last: bool) -> None:
    if last:
        _HERE.clear()


def _place() -> str:
    """What processes that can share memory have in common; "" where there is no such thing."""
    if sys.platform != "linux" or not hasattr(socket, "send_fds"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return ""


def _reason(cards: list[dict]) -> str:
    if not all(card["place"] for card in cards):
        return "no shared memory between processes on this system"
    return "the ranks are on different hosts, or of different users"


def _unique() -> str:
    return secrets.token_hex(8)


def _exchange(store: dist.Store, rank: int, size: int, card: dict) -> list[dict]:
    """Every rank's card. A store may live on when a group is made again: each time has keys of its own."""
    turn = (store.add("shm/come", 1) - 1) // size
    keys = [f"shm/{turn}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(card))
    store.wait(keys)
    return [json.loads(store.get(key)) for key in keys]


def _meet(cards: list[dict], ranks: tuple[int, ...], rank: int, timeout_s: float, name: str) -> Members:
    """Connect with every other rank: this one calls those before it and waits for those after it."""
    here, group = _here(), cards[0]["group"]
    socks, pids = [None] * len(cards), [None] * len(cards)
    for other in range(rank):
        socks[other], pids[other] = here.connect(cards[other]["token"], (group, "meet", rank))
    for other in range(rank + 1, len(cards)):
        came = here.arrival((group, "meet", other), lambda: True, timeout_s)
        if came is None:
            raise dist.DistBackendError(f"rank {ranks[other]} did not connect to rank {ranks[rank]} in {timeout_s:g} s")
        socks[other], pids[other] = came
    meeting = Meeting(here, ranks, rank, socks, name, timeout_s)
    return Members(here, meeting, [card["token"] for card in cards], pids, group, _left)
