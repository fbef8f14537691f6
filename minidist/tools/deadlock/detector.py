"""Deadlock detection from the status of all ranks, without a time-out.

The operation that a rank waits for can complete once every rank of its group has launched it. A waiting rank is stuck
if one of the ranks that have not launched the operation has ended or is stuck itself. The detector starts with all
waiting ranks whose operation is incomplete and removes, until nothing changes, those for which every missing rank can
still launch its part. None of the remaining ranks can be the first to proceed, so they are deadlocked, even while
other ranks keep working.

The detector assumes that a rank launches operations from the thread that waits. A rank whose second thread would launch
the missing operation is reported although it could proceed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import ChannelProgress, Snapshot
from minidist.tools.deadlock.status_report import describe_ranks, format_group, shorten_location

ENDED = ("returned", "failed", "died")
_JOIN_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """The finding that some ranks can never proceed, and the explanation.

    kind: "deadlock", or "mismatch" if two ranks launched different operations. ranks: the global ranks that are stuck,
    or the two whose operations differ. text: the explanation for the user, under 15 lines.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def detect_deadlock(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """Return the deadlock or mismatch that the status of the ranks shows; None if every rank may still proceed.

    snapshots: by global rank, for each rank whose status was equal in two consecutive readings. All first readings must
    precede all second readings, so that all ranks were in these states at one time. A missing rank counts as running.
    """
    if verdict := find_operation_mismatch(snapshots):
        return verdict
    missing = {rank: _missing(rank, snapshot, snapshots) for rank, snapshot in sorted(snapshots.items())}
    stuck = {rank for rank, ranks in missing.items() if ranks}
    ended_ranks = {rank for rank, snapshot in snapshots.items() if snapshot.state in ENDED}
    while freed := {
        rank for rank in stuck if not any(other in stuck or other in ended_ranks for other in missing[rank])
    }:
        stuck -= freed
    if not stuck:
        return None
    blocking_ranks = {rank: [m for m in missing[rank] if m in stuck or m in ended_ranks] for rank in sorted(stuck)}
    return _deadlock_verdict(blocking_ranks, snapshots)


def find_operation_mismatch(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """Find two ranks that launched different operations under the same sequence number of a channel.

    Return None if there are no such ranks. A waiting rank is compared with its peers only on the channel on which it
    waits, a rank that has ended on all its channels; a running rank starts no comparison.
    snapshots: by global rank.
    """
    for rank, snapshot in sorted(snapshots.items()):
        channels = [snapshot.wait_channel] if snapshot.state == "waiting" else []
        channels = list(snapshot.progress_by_channel) if snapshot.state in ENDED else channels
        for channel in channels:
            if verdict := _mismatch(rank, channel, snapshots):
                return verdict
    return None


class ReportDelay:
    """Holds a deadlock verdict back while any rank is still running, for at most a second.

    The detector may find a deadlock just before another rank joins it. With the delay, the report includes that rank
    whether it joined before or after the first finding.
    """

    def __init__(self):
        self._first_found_s: float | None = None

    def release_if_due(
        self, verdict: Verdict | None, snapshots: Mapping[int, Snapshot], all_ranks: Iterable[int], now_s: float
    ) -> Verdict | None:
        """Return `verdict` if it may be reported now, else None. Call it again after every reading.

        snapshots: those that the verdict is based on, by rank. all_ranks: the ranks of the run; those without a
        snapshot count as running. now_s: of `time.monotonic`.
        """
        if verdict is None or verdict.kind != "deadlock":
            self._first_found_s = None
            return verdict
        self._first_found_s = now_s if self._first_found_s is None else self._first_found_s
        is_any_running = any(
            rank not in snapshots or snapshots[rank].state in ("idle", "running") for rank in all_ranks
        )
        return None if is_any_running and now_s - self._first_found_s < _JOIN_S else verdict


class DeadlockDetector:
    """Detects a deadlock from repeated readings of the status of all ranks.

    interval_s: the least time between two readings.
    """

    def __init__(self, interval_s: float = 0.06):
        self.interval_s = interval_s
        self._previous: Mapping[int, Snapshot | None] = {}
        self._last_reading_s = float("-inf")
        self._report_delay = ReportDelay()

    def seconds_until_next_reading(self, now_s: float) -> float:
        """Return how long to wait before the next call of `update`; `now_s` is of `time.monotonic`."""
        return max(0.0, self._last_reading_s + self.interval_s - now_s)

    def update(self, snapshots: Mapping[int, Snapshot | None], now_s: float) -> Verdict | None:
        """Compare this reading of all ranks with the previous one; return the verdict to report now, or None.

        snapshots: by rank, read at `now_s`; None for a rank whose status could not be read.
        """
        same = {rank: s for rank, s in snapshots.items() if s is not None and self._previous.get(rank) == s}
        self._previous, self._last_reading_s = snapshots, now_s
        return self._report_delay.release_if_due(detect_deadlock(same), same, snapshots, now_s)


def _missing(rank: int, snapshot: Snapshot, snapshots: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that, by their status, have not launched the operation that `rank` waits for."""
    if snapshot.state != "waiting" or snapshot.wait_channel is None:
        return []
    channel = snapshot.wait_channel
    return [m for m in _others(rank, channel) if _launched(m, rank, channel, snapshots) < snapshot.wait_seq]


def _others(rank: int, channel: Channel) -> list[int]:
    return [other for other in channel.ranks if other != rank] if channel.peer is None else [channel.peer]


def _matching(rank: int, channel: Channel) -> Channel:
    """Return the channel on which other ranks launch the matching operations: the same, or recv for send."""
    if channel.peer is None:
        return channel
    return channel._replace(kind="recv" if channel.kind == "send" else "send", peer=rank)


def _launched(other: int, rank: int, channel: Channel, snapshots: Mapping[int, Snapshot]) -> int:
    progress = snapshots[other].progress_by_channel.get(_matching(rank, channel)) if other in snapshots else None
    return progress.num_launched if progress else 0


def _mismatch(rank: int, channel: Channel | None, snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    own_progress = snapshots[rank].progress_by_channel.get(channel)
    for other in _others(rank, channel) if own_progress else []:
        peer_progress = (
            snapshots[other].progress_by_channel.get(_matching(rank, channel)) if other in snapshots else None
        )
        if peer_progress is None:
            continue
        a, b = _by_seq(own_progress), _by_seq(peer_progress)
        for seq in sorted(a.keys() & b.keys()):
            if a[seq][0] != b[seq][0]:
                first = sorted([(rank, channel, a[seq][1]), (other, _matching(rank, channel), b[seq][1])])
                return _mismatch_verdict(first, seq, snapshots)
    return None


def _by_seq(progress: ChannelProgress) -> dict[int, tuple[int, str]]:
    first = progress.num_launched - len(progress.recent_operations) + 1
    return dict(enumerate(progress.recent_operations, start=first))


def _mismatch_verdict(pair, seq: int, snapshots: Mapping[int, Snapshot]) -> Verdict:
    (low, channel, _), (high, _, _) = pair
    members = (
        f"of {format_group(channel)}"
        if channel.peer is None
        else f"between ranks {low} and {high} of {format_group(channel)}"
    )
    lines = [f"mismatch: operation #{seq} {members} is not the same on ranks {low} and {high}"]
    for rank, _, text in pair:
        snapshot = snapshots[rank]
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
    return Verdict("mismatch", (low, high), "\n".join(lines))


def _deadlock_verdict(blocking_ranks: Mapping[int, list[int]], snapshots: Mapping[int, Snapshot]) -> Verdict:
    stuck = tuple(blocking_ranks)
    involved = sorted({*stuck, *(m for ranks in blocking_ranks.values() for m in ranks)})
    verb = "waits for something" if len(stuck) == 1 else "wait for something"
    lines = [f"deadlock: {format_ranks(stuck)} {verb} that can never happen"]
    lines += describe_ranks({rank: snapshots[rank] for rank in involved})
    lines += _reason(blocking_ranks, snapshots)
    return Verdict("deadlock", stuck, "\n".join(lines))


def _reason(blocking_ranks: Mapping[int, list[int]], snapshots: Mapping[int, Snapshot]) -> list[str]:
    """Explain the deadlock: a rank ended without launching its part, or ranks wait for each other in a cycle."""
    for rank, ranks in blocking_ranks.items():
        ended = [m for m in ranks if snapshots[m].state in ENDED]
        if ended:
            part = _describe_operation(rank, snapshots[rank])
            same = [m for m in ended if snapshots[m].state == snapshots[ended[0]].state]
            return [f"{format_ranks(same)} {snapshots[ended[0]].state} without launching {part}"]
    links, rank = [], next(iter(blocking_ranks))
    while rank not in [first for first, _ in links]:
        links.append((rank, blocking_ranks[rank][0]))
        rank = blocking_ranks[rank][0]
    cycle = links[[first for first, _ in links].index(rank) :]
    parts = [f"rank {a} waits for rank {b} to launch {_describe_operation(a, snapshots[a])}" for a, b in cycle]
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
