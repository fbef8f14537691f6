"""The rules that NCCL demands of a program, checked on the logs of a run on any backend.

The log of a rank is the records of its traffic meter, which writes one record per communication operation. gloo runs
many programs with which NCCL hangs, so a layout that ran on a laptop proves nothing for GPUs until its log obeys these
rules (NCCL user guide: "Using multiple NCCL communicators concurrently", "Point-to-point communication", and one
communicator rank per device):

* order: an operation on a GPU may keep those that were launched after it from running until it ends, whatever their
  group. So the run must come to its end even if every rank launches its next operation only when its previous one has
  ended on all ranks of that operation. Transfers that were launched together, in one batch, count as one operation;
* device: all tensors of a rank are on one device, and no two ranks of a machine share a CUDA device.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby

from minidist.comm.meter import Record

Log = Sequence[Record]
_TRANSFERS = ("send", "recv")


def find_nccl_violations(logs_by_rank: Mapping[int, Log], node_by_rank: Mapping[int, int] | None = None) -> list[str]:
    """Return a line of text for each way in which a run could hang or fail with NCCL; [] if NCCL could run it.

    Checks that the run would end if every operation blocked those launched after it, and that no two ranks of a machine
    share a CUDA device (details: module docstring). logs_by_rank: by global rank, the records of its `Meter`, in the
    order of launch. node_by_rank: by global rank, the index of its machine; None: all on one machine.
    """
    return _check_order(logs_by_rank) + _check_devices(logs_by_rank, node_by_rank or dict.fromkeys(logs_by_rank, 0))


def _check_order(logs_by_rank: Mapping[int, Log]) -> list[str]:
    """Replay the logs, each operation blocking its ranks until it ends; return the ranks that never end, and where."""
    remaining = {rank: deque(_group_batches(log)) for rank, log in logs_by_rank.items()}
    launched: Counter = Counter()  # by operation key
    for rank, units in remaining.items():
        _count_launches(launched, rank, units)
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for rank, units in remaining.items():
            while units and all(_is_complete(launched, rank, record) for record in units[0]):
                units.popleft()
                _count_launches(launched, rank, units)
                has_progressed = True
    return [
        f"rank {rank}: {_describe_operation(units[0])} would not end if operations ran one after the other, "
        "in the order of launch"
        for rank, units in sorted(remaining.items())
        if units
    ]


def _group_batches(log: Log) -> list[list[Record]]:
    """Group the records of one batch; every other record is a group of its own."""
    apart = groupby(enumerate(log), key=lambda item: item[1].batch or (item[0],))
    return [[record for _, record in records] for _, records in apart]


def _operation_key(rank: int, record: Record, kind: str | None = None) -> tuple:
    """Return the same key on all ranks of an operation: by number for a collective, by its two ends for a transfer."""
    if record.name not in _TRANSFERS:
        return record.group_name, record.ranks, record.name, record.seq
    kind = kind or record.name
    ends = (rank, record.peer) if record.name == "send" else (record.peer, rank)
    return record.group_name, record.ranks, kind, record.tag, *ends, record.seq


def _count_launches(launched: Counter, rank: int, units: "deque[list[Record]]") -> None:
    """Count the launches of the first of `units`, the batches that `rank` has yet to complete; none if it is done."""
    for record in units[0] if units else ():
        launched[_operation_key(rank, record)] += 1


def _is_complete(launched: Counter, rank: int, record: Record) -> bool:
    """Return whether all other ranks of the operation have launched it too."""
    if record.name in _TRANSFERS:
        return launched[_operation_key(rank, record, "recv" if record.name == "send" else "send")] > 0
    return launched[_operation_key(rank, record)] == len(record.ranks)


def _check_devices(logs_by_rank: Mapping[int, Log], node_by_rank: Mapping[int, int]) -> list[str]:
    """Return a line for each rank that sends from several devices, and each CUDA device that ranks share."""
    devices = {rank: sorted({record.device for record in log}) for rank, log in logs_by_rank.items() if log}
    problems = [
        f"rank {rank} sends from several devices: {', '.join(names)}" for rank, names in devices.items() if names[1:]
    ]
    for a, b in combinations(sorted(devices), 2):
        for device in set(devices[a]) & set(devices[b]):
            if device.startswith("cuda") and node_by_rank[a] == node_by_rank[b]:
                problems.append(f"ranks {a} and {b} share {device}")
    return problems


def _describe_operation(unit: Sequence[Record]) -> str:
    """Return an operation, or the first of a batch, as text: name, number, peer and group."""
    record = unit[0]
    peer = "" if record.peer is None else f" with rank {record.peer}"
    more = f" and {len(unit) - 1} more of its batch" if len(unit) > 1 else ""
    return f"{record.name} #{record.seq}{peer} of '{record.group_name}'{more}"
