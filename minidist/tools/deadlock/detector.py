"""Deadlock detection from the status of all ranks, without a time-out.

The operation that a rank waits for can complete once every rank of its group has launched it. A waiting rank is stuck
if one of the ranks that have not launched the operation has ended or is stuck itself. The detector starts with all
waiting ranks whose operation is incomplete and removes, until nothing changes, those for which every missing rank can
still launch its part. None of the remaining ranks can be the first to proceed, so they are deadlocked, even while
other ranks keep working.

On GPUs a wait does not block the program, so an operation that the GPU has not completed counts as waited for
("pending"), and operations run in the order of launch, as NCCL demands. A running program may still launch what is
missing; what it has launched behind a pending operation runs only after it.

The detector assumes that a rank launches operations from the thread that waits. A rank whose second thread would launch
the missing operation is reported although it could proceed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import ChannelProgress, Snapshot
from minidist.tools.deadlock.status_report import describe_ranks, format_group, shorten_location

ENDED = ("returned", "failed", "died")
BLOCKED = ("waiting", "pending")
_JOIN_S = 1.0


class Status(Protocol):
    """The status of one rank, as deadlock detection reads it. `Snapshot` and `RankFacts` have these attributes.

    state: "running", "waiting", ... (see `Snapshot`). wait_channel, wait_seq: the channel and the sequence number of
    the operation that the rank waits for; wait_operation: its name, shape and dtype as text; wait_location: the
    "file:line" of the call. progress_by_channel: the operations that the rank has launched on each channel. A channel
    is an ordered sequence of operations, such as all collectives of a group.
    """

    state: str
    wait_channel: Channel | None
    wait_seq: int
    wait_operation: str
    wait_location: str
    progress_by_channel: Mapping[Channel, ChannelProgress]

    def progress_on(self, channel: Channel) -> ChannelProgress | None:
        """Return how many and which operations the rank has launched on `channel`; None for an unused channel."""


class AwaitedOperation(NamedTuple):
    """The operation that a rank waits for: number `seq` on `channel`, an ordered sequence of operations of a group.

    rank: for a send or receive, the waiting rank; for a collective, None.
    """

    channel: Channel
    seq: int
    rank: int | None


@dataclass(frozen=True)
class Diagnosis:
    """A finding of deadlock detection: some ranks can never proceed.

    kind: "deadlock"; "mismatch" if two ranks launched different operations; "hang" if a killed rank does not end.
    ranks: the global ranks that are stuck or hang, or the two ranks whose operations differ. text: the explanation for
    the user, under 15 lines. involved_ranks: for a deadlock, the stuck ranks and the ranks that they wait for.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    involved_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text


def detect_deadlock(stable_statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Return the deadlock or mismatch of operations that the status of the ranks shows; None if there is none.

    stable_statuses: by global rank, the status of each rank whose status was equal in two consecutive readings. The
    first reading of every rank must precede the second reading of every rank, so that all ranks were in these states at
    one time. A rank without an entry counts as running. The running time is linear in the number of ranks and of
    operations that they wait for.
    """
    if diagnosis := find_operation_mismatch(stable_statuses):
        return diagnosis
    ranks_by_wait = _group_by_wait(stable_statuses)
    missing = {wait: _find_missing_ranks(wait, stable_statuses) for wait in ranks_by_wait}
    stuck = {rank for wait, ranks in ranks_by_wait.items() if missing[wait] for rank in ranks}
    # Free the ranks whose missing ranks can all still launch their part, then those that waited for a freed rank, ...
    blocking = {
        wait: [m for m in ranks if _prevents_completion(m, wait, stuck, stable_statuses)]
        for wait, ranks in missing.items()
    }
    waits_for: dict[int, list[AwaitedOperation]] = {}
    for wait, ranks in blocking.items():
        for rank in ranks:
            waits_for.setdefault(rank, []).append(wait)
    num_blocking = {wait: len(ranks) for wait, ranks in blocking.items()}
    free = [wait for wait, count in num_blocking.items() if not count]
    while free:
        for rank in ranks_by_wait[free.pop()]:
            stuck.discard(rank)
            for wait in waits_for.get(rank, ()):
                num_blocking[wait] -= 1
                if not num_blocking[wait]:
                    free.append(wait)
    if not stuck:
        return None
    stuck_waits = {
        wait: [m for m in blocking[wait] if m in stuck or stable_statuses[m].state in ENDED]
        for wait in ranks_by_wait
        if num_blocking[wait]
    }
    return _diagnose_deadlock(sorted(stuck), stuck_waits, ranks_by_wait, stable_statuses)


def find_awaited_ranks(statuses: Mapping[int, Status]) -> dict[int, dict[AwaitedOperation, list[int]]]:
    """Return the running ranks that other ranks wait for, as {running rank: {operation: ranks that wait in it}}.

    The operations are those that the running rank has not launched. statuses: the status of each rank, by global rank;
    a rank without a status counts as running.
    """
    awaited: dict[int, dict[AwaitedOperation, list[int]]] = {}
    for wait, ranks in _group_by_wait(statuses).items():
        for rank in _find_missing_ranks(wait, statuses):
            if rank not in statuses or statuses[rank].state in ("idle", "running"):
                awaited.setdefault(rank, {})[wait] = ranks
    return awaited


def find_operation_mismatch(statuses: Mapping[int, Status]) -> Diagnosis | None:
    """Return a diagnosis on two ranks that launched different operations where they must be the same; None if none did.

    Two operations of the same number on one channel (an ordered sequence of operations of a group) must have the same
    name, dtype and, except for all_to_all, number of elements. Each waiting rank is compared with the other ranks of
    the channel on which it waits, and each ended rank with the other ranks of all its channels. Two running ranks are
    not compared. statuses: the status of each rank, by global rank.
    """
    first_ranks: dict[Channel, dict[int, dict[int, int]]] = {}
    for rank, snapshot in sorted(statuses.items()):
        channels = [snapshot.wait_channel] if snapshot.state in BLOCKED and snapshot.wait_channel else []
        channels = list(snapshot.progress_by_channel) if snapshot.state in ENDED else channels
        for channel in channels:
            own = snapshot.progress_on(channel)
            if own is None:
                continue
            if channel.peer is not None:
                peers = _first_rank_by_crc([channel.peer], _get_matching_channel(rank, channel), statuses)
            elif channel in first_ranks:
                peers = first_ranks[channel]
            else:
                peers = first_ranks[channel] = _first_rank_by_crc(channel.ranks, channel, statuses)
            different = [
                (other, seq)
                for seq, (crc, _) in _recent_operations_by_seq(own).items()
                for other_crc, other in peers.get(seq, {}).items()
                if other_crc != crc
            ]
            if different:
                other, seq = min(different)
                return _diagnose_mismatch(rank, other, channel, seq, statuses)
    return None


class ReportDelay:
    """Delays the report of a deadlock while any rank is still running, for at most a second.

    Such a rank may be about to join the deadlock. With the delay the report names that rank, too.
    """

    def __init__(self):
        self._first_found_time: float | None = None

    def release_if_due(
        self, diagnosis: Diagnosis | None, snapshots: Mapping[int, Snapshot], all_ranks: Iterable[int], now_s: float
    ) -> Diagnosis | None:
        """Return `diagnosis` if it is to be reported now, else None. Call this after every reading of the status.

        A diagnosis that is not a "deadlock" is returned at once. snapshots: the status by rank from which the diagnosis
        follows. all_ranks: the ranks of the run; a rank without a snapshot counts as running. now_s:
        `time.monotonic()`.
        """
        if diagnosis is None or diagnosis.kind != "deadlock":
            self._first_found_time = None
            return diagnosis
        self._first_found_time = now_s if self._first_found_time is None else self._first_found_time
        is_any_running = any(
            rank not in snapshots or snapshots[rank].state in ("idle", "running") for rank in all_ranks
        )
        return None if is_any_running and now_s - self._first_found_time < _JOIN_S else diagnosis


class DeadlockDetector:
    """Detects a deadlock from repeated readings of the status of all ranks: call `update` with each reading.

    interval_s: the least time in seconds between two readings; the caller waits `seconds_until_next_reading`.
    """

    def __init__(self, interval_s: float = 0.06):
        self.interval_s = interval_s
        self._previous: Mapping[int, Snapshot | None] = {}
        self._last_reading_s = float("-inf")
        self._report_delay = ReportDelay()

    def seconds_until_next_reading(self, now_s: float) -> float:
        """Return how many seconds after `now_s` the next call of `update` is due; 0.0 if it is due now."""
        return max(0.0, self._last_reading_s + self.interval_s - now_s)

    def update(self, snapshots: Mapping[int, Snapshot | None], now_s: float) -> Diagnosis | None:
        """Compare this reading of all ranks with the previous one; return a deadlock or mismatch to report, or None.

        snapshots: by rank, the status read at `now_s` (`time.monotonic()`); None for a rank whose status could not be
        read.
        """
        same = {rank: s for rank, s in snapshots.items() if s is not None and self._previous.get(rank) == s}
        self._previous, self._last_reading_s = snapshots, now_s
        return self._report_delay.release_if_due(detect_deadlock(same), same, snapshots, now_s)


def _group_by_wait(statuses: Mapping[int, Status]) -> dict[AwaitedOperation, list[int]]:
    """Return the ranks that wait for each operation, both in ascending order."""
    ranks_by_wait: dict[AwaitedOperation, list[int]] = {}
    for rank, snapshot in sorted(statuses.items()):
        if snapshot.state in BLOCKED and snapshot.wait_channel is not None:
            own = None if snapshot.wait_channel.peer is None else rank
            ranks_by_wait.setdefault(AwaitedOperation(snapshot.wait_channel, snapshot.wait_seq, own), []).append(rank)
    return ranks_by_wait


def _find_missing_ranks(wait: AwaitedOperation, statuses: Mapping[int, Status]) -> list[int]:
    """Return the ranks that, by their status, have not launched their part of the operation."""
    channel = wait.channel
    if channel.peer is not None:
        matching = _get_matching_channel(wait.rank, channel)
        return [] if _has_reached(channel.peer, matching, wait.seq, statuses) else [channel.peer]
    return [rank for rank in channel.ranks if not _has_reached(rank, channel, wait.seq, statuses)]


def _has_reached(rank: int, channel: Channel, seq: int, statuses: Mapping[int, Status]) -> bool:
    """Return whether the rank has launched the operation, and its GPU completed those before (NCCL's order)."""
    progress = statuses[rank].progress_on(channel) if rank in statuses else None
    if progress is None or progress.num_launched < seq:
        return False
    if seq <= progress.num_launched - progress.num_pending:
        return True
    return (statuses[rank].wait_channel, statuses[rank].wait_seq) == (channel, seq)


def _prevents_completion(rank: int, wait: AwaitedOperation, stuck: set[int], statuses: Mapping[int, Status]) -> bool:
    """Return whether `rank` will never launch its part of the operation: it has ended or is in `stuck`."""
    if rank not in statuses:
        return False
    if statuses[rank].state == "pending":  # its program runs, and may still launch what it has not launched
        channel = wait.channel if wait.channel.peer is None else _get_matching_channel(wait.rank, wait.channel)
        progress = statuses[rank].progress_on(channel)
        return rank in stuck and progress is not None and progress.num_launched >= wait.seq
    return rank in stuck or statuses[rank].state in ENDED


def _get_matching_channel(rank: int, channel: Channel) -> Channel:
    """Return the channel on which other ranks launch the counterparts of `rank`'s operations on `channel`.

    For a collective it is the same channel; for a send, the peer's recv channel from `rank`; for a recv, the reverse.
    """
    if channel.peer is None:
        return channel
    return channel._replace(kind="recv" if channel.kind == "send" else "send", peer=rank)


def _first_rank_by_crc(
    ranks: Iterable[int], channel: Channel, statuses: Mapping[int, Status]
) -> dict[int, dict[int, int]]:
    """Return, for each sequence number, the distinct crcs and for each of them the first rank that has it."""
    by_seq: dict[int, dict[int, int]] = {}
    for rank in ranks:
        progress = statuses[rank].progress_on(channel) if rank in statuses else None
        for seq, (crc, _) in _recent_operations_by_seq(progress).items() if progress else ():
            by_seq.setdefault(seq, {}).setdefault(crc, rank)
    return by_seq


def _recent_operations_by_seq(progress: ChannelProgress) -> dict[int, tuple[int, str]]:
    """Return the (crc, description) of the last operations of a channel, by sequence number."""
    first = progress.num_launched - len(progress.recent_operations) + 1
    return dict(enumerate(progress.recent_operations, start=first))


def _diagnose_mismatch(rank: int, other: int, channel: Channel, seq: int, statuses: Mapping[int, Status]) -> Diagnosis:
    """Return the diagnosis that ranks `rank` and `other` launched different operations as number `seq`."""
    pair = sorted([(rank, channel), (other, _get_matching_channel(rank, channel))])
    (low, channel), (high, _) = pair
    members = (
        f"of {format_group(channel)}"
        if channel.peer is None
        else f"between ranks {low} and {high} of {format_group(channel)}"
    )
    lines = [f"mismatch: operation #{seq} {members} is not the same on ranks {low} and {high}"]
    for rank, own_channel in pair:
        snapshot = statuses[rank]
        text = _recent_operations_by_seq(snapshot.progress_on(own_channel))[seq][1]
        where = (
            f", waiting at {shorten_location(snapshot.wait_location)}"
            if snapshot.state == "waiting"
            else f" ({snapshot.state})"
        )
        lines.append(f"  rank {rank}: {text}{where}")
    lines.append(
        "every rank of a group must launch the same operations, of the same shape and dtype, in the same order"
        if channel.peer is None
        else "a send and its recv must agree in number of elements and dtype"
    )
    return Diagnosis("mismatch", (low, high), "\n".join(lines))


def _diagnose_deadlock(
    stuck: list[int],
    stuck_waits: Mapping[AwaitedOperation, list[int]],
    ranks_by_wait: Mapping[AwaitedOperation, list[int]],
    statuses: Mapping[int, Status],
) -> Diagnosis:
    """Return the diagnosis that the ranks in `stuck` are deadlocked."""
    involved = sorted({*stuck, *(m for ranks in stuck_waits.values() for m in ranks)})
    verb = "waits for something" if len(stuck) == 1 else "wait for something"
    lines = [f"deadlock: {format_ranks(stuck)} {verb} that can never happen"]
    lines += describe_ranks({rank: statuses[rank] for rank in involved})
    lines += _explain_deadlock(stuck_waits, ranks_by_wait, statuses)
    return Diagnosis("deadlock", tuple(stuck), "\n".join(lines), tuple(involved))


def _explain_deadlock(
    stuck_waits: Mapping[AwaitedOperation, list[int]],
    ranks_by_wait: Mapping[AwaitedOperation, list[int]],
    statuses: Mapping[int, Status],
) -> list[str]:
    """Explain the deadlock: a rank ended without launching its part, or ranks wait for each other in a cycle."""
    for wait, ranks in stuck_waits.items():
        ended = [m for m in ranks if statuses[m].state in ENDED]
        if ended:
            rank = ranks_by_wait[wait][0]
            part = _describe_operation(rank, statuses[rank])
            same = [m for m in ended if statuses[m].state == statuses[ended[0]].state]
            return [f"{format_ranks(same)} {statuses[ended[0]].state} without launching {part}"]
    wait_of = {rank: wait for wait in stuck_waits for rank in ranks_by_wait[wait]}
    next_rank, rank = {}, next(iter(wait_of))
    while rank not in next_rank:
        next_rank[rank] = stuck_waits[wait_of[rank]][0]
        rank = next_rank[rank]
    links = list(next_rank.items())
    cycle = links[list(next_rank).index(rank) :]
    parts = [f"rank {a} waits for rank {b} to launch {_describe_operation(a, statuses[a])}" for a, b in cycle]
    parts = parts if len(parts) <= 4 else [*parts[:2], f"and so on in a cycle of {len(cycle)} ranks"]
    return [f"{part}," for part in parts[:-1]] + parts[-1:]


def _describe_operation(rank: int, snapshot: Snapshot) -> str:
    """Name the operation that the other rank would have to launch."""
    channel = snapshot.wait_channel
    if channel.peer is None:
        return f"{snapshot.wait_operation.split(' ')[0]} #{snapshot.wait_seq} of '{channel.group_name}'"
    if channel.kind == "send":
        return f"recv #{snapshot.wait_seq} from rank {rank} of '{channel.group_name}'"
    return f"send #{snapshot.wait_seq} to rank {rank} of '{channel.group_name}'"
