"""The rules that NCCL demands of a program, checked on the meters' logs of a run on any backend.

gloo forgives much that NCCL answers with a hang, so a layout that ran on a laptop proves nothing for GPUs until its log
obeys these rules (NCCL user guide: "Using multiple NCCL communicators concurrently", "Point-to-point communication",
and one communicator rank per device):

* order: an operation on a GPU may keep those that were launched after it from running until it ends, whatever their
  group. So the run must come to its end even if every rank launches its next operation only when the one before has
  ended on all its ranks. Transfers that were launched together, in one batch, count as one operation;
* device: all tensors of a rank are on one device, and no two ranks of a machine share a CUDA device.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby

from minidist.comm.meter import Record

Log = Sequence[Record]
_TRANSFERS = ("send", "recv")


def violations(logs: Mapping[int, Log], nodes: Mapping[int, int] | None = None) -> list[str]:
    """What breaks a rule, one line each, given every rank's records in the order of launch.

    nodes: the machine of each rank; all on one when not given.
    """
    return _stuck(logs) + _devices(logs, nodes or dict.fromkeys(logs, 0))


def _stuck(logs: Mapping[int, Log]) -> list[str]:
    """Replay the logs, each operation blocking its ranks until it ends: who never comes to the end, and where."""
    left = {rank: deque(_together(log)) for rank, log in logs.items()}
    begun: Counter = Counter()  # ends of an operation that ranks have come to, by what both ends have in common
    for rank, units in left.items():
        _begin(begun, rank, units)
    moved = True
    while moved:
        moved = False
        for rank, units in left.items():
            while units and all(_met(begun, rank, record) for record in units[0]):
                units.popleft()
                _begin(begun, rank, units)
                moved = True
    return [
        f"rank {rank}: {_told(units[0])} would not end if operations ran one after the other, in the order of launch"
        for rank, units in sorted(left.items())
        if units
    ]


def _together(log: Log) -> list[list[Record]]:
    """The records, those of one batch as one."""
    apart = groupby(enumerate(log), key=lambda item: item[1].batch or (item[0],))
    return [[record for _, record in records] for _, records in apart]


def _key(rank: int, record: Record, kind: str | None = None) -> tuple:
    """What all who take part in an operation call it: a collective by its number, a transfer by its two ends."""
    if record.name not in _TRANSFERS:
        return record.use, record.ranks, record.name, record.seq
    kind = kind or record.name
    ends = (rank, record.peer) if record.name == "send" else (record.peer, rank)
    return record.use, record.ranks, kind, record.tag, *ends, record.seq


def _begin(begun: Counter, rank: int, units: "deque[list[Record]]") -> None:
    for record in units[0] if units else ():
        begun[_key(rank, record)] += 1


def _met(begun: Counter, rank: int, record: Record) -> bool:
    """Whether all others of an operation have come to it as well."""
    if record.name in _TRANSFERS:
        return begun[_key(rank, record, "recv" if record.name == "send" else "send")] > 0
    return begun[_key(rank, record)] == len(record.ranks)


def _devices(logs: Mapping[int, Log], nodes: Mapping[int, int]) -> list[str]:
    devices = {rank: sorted({record.device for record in log}) for rank, log in logs.items() if log}
    found = [f"rank {rank} sends from several devices: {', '.join(many)}" for rank, many in devices.items() if many[1:]]
    for a, b in combinations(sorted(devices), 2):
        for device in set(devices[a]) & set(devices[b]):
            if device.startswith("cuda") and nodes[a] == nodes[b]:
                found.append(f"ranks {a} and {b} share {device}")
    return found


def _told(unit: Sequence[Record]) -> str:
    record = unit[0]
    peer = "" if record.peer is None else f" with rank {record.peer}"
    more = f" and {len(unit) - 1} more of its batch" if len(unit) > 1 else ""
    return f"{record.name} #{record.seq}{peer} of '{record.use}'{more}"
