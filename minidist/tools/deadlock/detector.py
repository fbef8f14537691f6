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
from minidist.tools.deadlock.status_page import Progress, Snapshot
from minidist.tools.deadlock.status_report import describe_ranks, format_group, short_location

ENDED = ("returned", "failed", "died")
_JOIN_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """Why these ranks can never proceed. kind: "deadlock" or "mismatch"; text: the explanation, under 15 lines."""

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def detect_deadlock(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """Return why some ranks can never proceed, None if every rank still may.

    snapshots: by rank, of those ranks only whose status was equal in two readings, where the first readings of all
    ranks came before the second of any: all were in this state at the same time. A missing rank counts as running.
    """
    if verdict := find_mismatch(snapshots):
        return verdict
    missing = {rank: _missing(rank, snapshot, snapshots) for rank, snapshot in sorted(snapshots.items())}
    stuck = {rank for rank, ranks in missing.items() if ranks}
    lost = {rank for rank, snapshot in snapshots.items() if snapshot.state in ENDED}
    while freed := {rank for rank in stuck if not any(other in stuck or other in lost for other in missing[rank])}:
        stuck -= freed
    if not stuck:
        return None
    hopeless = {rank: [m for m in missing[rank] if m in stuck or m in lost] for rank in sorted(stuck)}
    return _deadlock(hopeless, snapshots)


def find_mismatch(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """Return which two ranks launched different operations under one sequence number, None if no ranks did.

    For a waiting rank only the channel on which it waits is compared, for a rank that has ended all its channels.
    """
    for rank, snapshot in sorted(snapshots.items()):
        channels = [snapshot.channel] if snapshot.state == "waiting" else []
        channels = list(snapshot.progress) if snapshot.state in ENDED else channels
        for channel in channels:
            if verdict := _mismatch(rank, channel, snapshots):
                return verdict
    return None


class Confirmation:
    """Delays the report of a deadlock while other ranks still work, for at most a second.

    A rank that is about to join the deadlock may do so before or after a reading. The delay makes the report the same
    in both cases.
    """

    def __init__(self):
        self._found_s: float | None = None

    def confirm(self, verdict: Verdict | None, seen: Mapping[int, Snapshot], ranks: Iterable[int], now_s: float):
        """Return the verdict on `seen` once it may be reported, None before. ranks: all ranks of the run; those that
        are missing in `seen` are working."""
        if verdict is None or verdict.kind != "deadlock":
            self._found_s = None
            return verdict
        self._found_s = now_s if self._found_s is None else self._found_s
        works = any(rank not in seen or seen[rank].state in ("idle", "running") for rank in ranks)
        return None if works and now_s - self._found_s < _JOIN_S else verdict


class DeadlockDetector:
    """Detects a deadlock from repeated readings of the status of all ranks."""

    def __init__(self, interval_s: float = 0.06):
        self.interval_s = interval_s
        self._previous: Mapping[int, Snapshot | None] = {}
        self._at_s = float("-inf")
        self._confirmation = Confirmation()

    def seconds_until_due(self, now_s: float) -> float:
        """Return the seconds until the next reading is due."""
        return max(0.0, self._at_s + self.interval_s - now_s)

    def update(self, snapshots: Mapping[int, Snapshot | None], now_s: float) -> Verdict | None:
        """Take the readings of all ranks made at `now_s` and return the verdict, if any. None is a failed reading."""
        same = {rank: s for rank, s in snapshots.items() if s is not None and self._previous.get(rank) == s}
        self._previous, self._at_s = snapshots, now_s
        return self._confirmation.confirm(detect_deadlock(same), same, snapshots, now_s)


def _missing(rank: int, snapshot: Snapshot, snapshots: Mapping[int, Snapshot]) -> list[int]:
    """Return the ranks that, by their status, have not launched the operation that `rank` waits for."""
    if snapshot.state != "waiting" or snapshot.channel is None:
        return []
    channel = snapshot.channel
    return [m for m in _others(rank, channel) if _launched(m, rank, channel, snapshots) < snapshot.seq]


def _others(rank: int, channel: Channel) -> list[int]:
    return [other for other in channel.ranks if other != rank] if channel.peer is None else [channel.peer]


def _matching(rank: int, channel: Channel) -> Channel:
    """Return the channel on which other ranks launch the matching operations: the same, or recv for send."""
    if channel.peer is None:
        return channel
    return channel._replace(kind="recv" if channel.kind == "send" else "send", peer=rank)


def _launched(other: int, rank: int, channel: Channel, snapshots: Mapping[int, Snapshot]) -> int:
    progress = snapshots[other].progress.get(_matching(rank, channel)) if other in snapshots else None
    return progress.launched if progress else 0


def _mismatch(rank: int, channel: Channel | None, snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    mine = snapshots[rank].progress.get(channel)
    for other in _others(rank, channel) if mine else []:
        theirs = snapshots[other].progress.get(_matching(rank, channel)) if other in snapshots else None
        if theirs is None:
            continue
        a, b = _by_seq(mine), _by_seq(theirs)
        for seq in sorted(a.keys() & b.keys()):
            if a[seq][0] != b[seq][0]:
                first = sorted([(rank, channel, a[seq][1]), (other, _matching(rank, channel), b[seq][1])])
                return _differ(first, seq, snapshots)
    return None


def _by_seq(progress: Progress) -> dict[int, tuple[int, str]]:
    first = progress.launched - len(progress.recent) + 1
    return dict(enumerate(progress.recent, start=first))


def _differ(pair, seq: int, snapshots: Mapping[int, Snapshot]) -> Verdict:
    (low, channel, _), (high, _, _) = pair
    what = (
        f"of {format_group(channel)}"
        if channel.peer is None
        else f"between ranks {low} and {high} of {format_group(channel)}"
    )
    lines = [f"mismatch: operation #{seq} {what} is not the same on ranks {low} and {high}"]
    for rank, _, text in pair:
        snapshot = snapshots[rank]
        where = (
            f", waiting at {short_location(snapshot.where)}" if snapshot.state == "waiting" else f" ({snapshot.state})"
        )
        lines.append(f"  rank {rank}: {text}{where}")
    lines.append(
        "every rank of a group must launch the same operations, of the same shape and dtype, in the same order"
        if channel.peer is None
        else "a send and its recv must agree in number of elements and dtype"
    )
    return Verdict("mismatch", (low, high), "\n".join(lines))


def _deadlock(hopeless: Mapping[int, list[int]], snapshots: Mapping[int, Snapshot]) -> Verdict:
    stuck = tuple(hopeless)
    involved = sorted({*stuck, *(m for ranks in hopeless.values() for m in ranks)})
    verb = "waits for something" if len(stuck) == 1 else "wait for something"
    lines = [f"deadlock: {format_ranks(stuck)} {verb} that can never happen"]
    lines += describe_ranks({rank: snapshots[rank] for rank in involved})
    lines += _reason(hopeless, snapshots)
    return Verdict("deadlock", stuck, "\n".join(lines))


def _reason(hopeless: Mapping[int, list[int]], snapshots: Mapping[int, Snapshot]) -> list[str]:
    """Explain the deadlock: a rank ended without launching its part, or ranks wait for each other in a cycle."""
    for rank, ranks in hopeless.items():
        ended = [m for m in ranks if snapshots[m].state in ENDED]
        if ended:
            part = _part(rank, snapshots[rank])
            same = [m for m in ended if snapshots[m].state == snapshots[ended[0]].state]
            return [f"{format_ranks(same)} {snapshots[ended[0]].state} without launching {part}"]
    links, rank = [], next(iter(hopeless))
    while rank not in [first for first, _ in links]:
        links.append((rank, hopeless[rank][0]))
        rank = hopeless[rank][0]
    circle = links[[first for first, _ in links].index(rank) :]
    parts = [f"rank {a} waits for rank {b} to launch {_part(a, snapshots[a])}" for a, b in circle]
    parts = parts if len(parts) <= 4 else [*parts[:2], f"and so on round a circle of {len(circle)} ranks"]
    return [f"{part}," for part in parts[:-1]] + parts[-1:]


def _part(rank: int, snapshot: Snapshot) -> str:
    """Name the operation that the other rank would have to launch."""
    channel = snapshot.channel
    if channel.peer is None:
        return f"{snapshot.operation.split(' ')[0]} #{snapshot.seq} of '{channel.use}'"
    if channel.kind == "send":
        return f"recv #{snapshot.seq} from rank {rank} of '{channel.use}'"
    return f"send #{snapshot.seq} to rank {rank} of '{channel.use}'"
