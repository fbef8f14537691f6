"""Small things that all ranks must know of each other, sent as tensors like everything else."""

import pickle
from collections.abc import Callable
from typing import Any

import torch

from minidist.comm.collectives import all_gather
from minidist.comm.group import Group


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's `value` (anything that can be pickled), in rank order, on every rank."""
    data = pickle.dumps(value)
    device = group.world.control_device
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    mine = torch.tensor([len(data)], dtype=torch.int64, device=device)
    all_gather(lengths, mine, group, async_op=True).wait(host=True)
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    all_gather(gathered, mine, group, async_op=True).wait(host=True)
    rows = gathered.view(group.size, longest).cpu()
    return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]


def exchange(group: Group) -> Callable[[Any], list[Any]]:
    """`gather_objects` with the group filled in, for code that must not depend on the network."""
    return lambda value: gather_objects(value, group)
