"""Gather and all-gather of picklable objects, sent as tensors through `collectives`."""

import pickle
from collections.abc import Callable
from typing import Any

import torch

from minidist.comm.collectives import all_gather, recv, send
from minidist.comm.group import Group


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Collective: return the `value` (any picklable object) of every rank, in rank order, on every rank."""
    data = pickle.dumps(value)
    device = group.world.control_device
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    all_gather(lengths, length, group, async_op=True).wait(host=True)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    all_gather(gathered, padded, group, async_op=True).wait(host=True)
    rows = gathered.view(group.size, longest).cpu()
    return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]


def gather_object(value: Any, group: Group) -> list[Any]:
    """Collective: return the picklable `value` of every rank, in rank order, on group rank 0; [] on the other ranks."""
    device = group.world.control_device
    values = [value]
    if group.rank:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        send(torch.tensor([len(data)], dtype=torch.int64, device=device), 0, group)
        send(data, 0, group)
        return []
    for rank in range(1, group.size):
        recv(length := torch.empty(1, dtype=torch.int64, device=device), rank, group)
        recv(data := torch.empty(int(length), dtype=torch.uint8, device=device), rank, group)
        values.append(pickle.loads(data.cpu().numpy().tobytes()))
    return values


def bind_all_gather_object(group: Group) -> Callable[[Any], list[Any]]:
    """Return the function `value -> all_gather_object(value, group)`, an argument of functions in `minidist.fault`."""
    return lambda value: all_gather_object(value, group)
