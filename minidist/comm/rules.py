"""The rules that NCCL demands of a program, checked on the meters' logs of a run on any backend.

gloo forgives much that NCCL answers with a hang, so a layout that ran on a laptop proves nothing for GPUs until its log
obeys these rules (NCCL user guide: "Using multiple NCCL communicators concurrently", "Point-to-point communication",
and one communicator rank per device):

* order: any two ranks launch the operations of all groups that contain both of them in the same order;
* batching: transfers of one rank that are in flight together were launched together;
* device: all tensors of a rank are on one device, and no two ranks of a machine share a CUDA device.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from minidist.comm.meter import Record

Log = Sequence[Record]
_TRANSFERS = ("send", "recv")


def violations(logs: Mapping[int, Log], nodes: Mapping[int, int] | None = None) -> list[str]:
    """What breaks a rule, one line each, given every rank's records in the order of launch.

    nodes: the machine of each rank; all on one when not given.
    """
    found = [line for a, b in combinations(sorted(logs), 2) for line in _order(logs, a, b)]
    for rank, log in sorted(logs.items()):
        found += _unbatched(rank, log)
    return found + _devices(logs, nodes or dict.fromkeys(logs, 0))


def _order(logs: Mapping[int, Log], a: int, b: int) -> list[str]:
    sequences = [
        [(r.name, r.use, r.seq) for r in logs[rank] if r.name not in _TRANSFERS and {a, b} <= set(r.ranks)]
        for rank in (a, b)
    ]
    for i, (one, other) in enumerate(zip(*sequences, strict=False)):
        if one != other:
            return [
                f"ranks {a} and {b}: operation {i} on shared groups is {_told(one)} on one, {_told(other)} on other"
            ]
    lengths = [len(sequence) for sequence in sequences]
    if lengths[0] != lengths[1]:
        return [f"ranks {a} and {b}: {lengths[0]} and {lengths[1]} operations on the groups they share"]
    return []


def _unbatched(rank: int, log: Log) -> list[str]:
    found, in_flight = [], []
    for record in (r for r in log if r.name in _TRANSFERS):
        in_flight = [r for r in in_flight if r.waited is None or r.waited > record.launched]
        for other in in_flight:
            if record.batch is None or record.batch != other.batch:
                found.append(
                    f"rank {rank}: {record.name} #{record.seq} with rank {record.peer} was launched while "
                    f"{other.name} #{other.seq} with rank {other.peer} was in flight, and not in one batch with it"
                )
        in_flight.append(record)
    return found


def _devices(logs: Mapping[int, Log], nodes: Mapping[int, int]) -> list[str]:
    devices = {rank: sorted({record.device for record in log}) for rank, log in logs.items() if log}
    found = [f"rank {rank} sends from several devices: {', '.join(many)}" for rank, many in devices.items() if many[1:]]
    for a, b in combinations(sorted(devices), 2):
        for device in set(devices[a]) & set(devices[b]):
            if device.startswith("cuda") and nodes[a] == nodes[b]:
                found.append(f"ranks {a} and {b} share {device}")
    return found


def _told(operation: tuple[str, str, int]) -> str:
    name, use, seq = operation
    return f"{name} #{seq} of '{use}'"
