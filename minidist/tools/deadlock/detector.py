"""Deadlock by proof, not by time-out: the boards of all ranks show when nothing can go on any more.

A rank that waits is *satisfied* when every rank its operation needs has launched its part; the rest is the network's
business. A waiting rank is stuck when one of the ranks it misses has ended or is stuck itself. To find them, call every
unsatisfied rank stuck and take away, again and again, those whose missing ranks can all still come. No rank of what
remains can be the first to move, so it is a deadlock, even while ranks outside of it work on.

A rank is taken to launch from the thread that waits: one whose second thread would launch the missing operation is
reported although it could go on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import Progress, Snapshot
from minidist.tools.deadlock.status_report import describe, group_name, place

ENDED = ("returned", "failed", "died")
_JOIN_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """Why these ranks can never go on. kind: "deadlock" or "mismatch"; text: fewer than 15 lines for a person."""

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def judge(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """The verdict on ranks that stand still; None when every one of them may still be helped.

    snapshots: by rank, only of ranks whose board was the same in two readings, the first readings of all before the
    second of any: then all stood like this at one moment. A rank that is not there counts as running.
    """
    if verdict := mismatched(snapshots):
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


def mismatched(snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """The verdict on ranks that launched different operations as the same one of a group; None when they did not.

    Of a rank that waits the channel it waits on counts, of one that has ended all of them.
    """
    for rank, snapshot in sorted(snapshots.items()):
        channels = [snapshot.channel] if snapshot.state == "waiting" else []
        channels = list(snapshot.progress) if snapshot.state in ENDED else channels
        for channel in channels:
            if verdict := _mismatch(rank, channel, snapshots):
                return verdict
    return None


class Joining:
    """Holds back a deadlock of some ranks while others work on, for at most a second.

    Whether a rank that is about to walk into it comes before or after a reading is chance, and what is told shall not
    depend on that.
    """

    def __init__(self):
        self._found_s: float | None = None

    def told(self, verdict: Verdict | None, seen: Mapping[int, Snapshot], ranks: Iterable[int], now_s: float):
        """The verdict on `seen` once it may be told, None until then. ranks: all there are; one not seen works on."""
        if verdict is None or verdict.kind != "deadlock":
            self._found_s = None
            return verdict
        self._found_s = now_s if self._found_s is None else self._found_s
        works = any(rank not in seen or seen[rank].state in ("idle", "running") for rank in ranks)
        return None if works and now_s - self._found_s < _JOIN_S else verdict


class Observer:
    """Reads the boards again and again and judges what two readings in a row agree on."""

    def __init__(self, interval_s: float = 0.06):
        self.interval_s = interval_s
        self._previous: Mapping[int, Snapshot | None] = {}
        self._at_s = float("-inf")
        self._joining = Joining()

    def due_in_s(self, now_s: float) -> float:
        """Seconds until the next reading."""
        return max(0.0, self._at_s + self.interval_s - now_s)

    def see(self, snapshots: Mapping[int, Snapshot | None], now_s: float) -> Verdict | None:
        """Judge the readings of all ranks made at `now_s`; None stands for a reading that failed."""
        same = {rank: s for rank, s in snapshots.items() if s is not None and self._previous.get(rank) == s}
        self._previous, self._at_s = snapshots, now_s
        return self._joining.told(judge(same), same, snapshots, now_s)


def _missing(rank: int, snapshot: Snapshot, snapshots: Mapping[int, Snapshot]) -> list[int]:
    """The ranks that have not launched their part of what `rank` waits for, as far as one can see."""
    if snapshot.state != "waiting" or snapshot.channel is None:
        return []
    channel = snapshot.channel
    return [m for m in _others(rank, channel) if _launched(m, rank, channel, snapshots) < snapshot.seq]


def _others(rank: int, channel: Channel) -> list[int]:
    return [other for other in channel.ranks if other != rank] if channel.peer is None else [channel.peer]


def _matching(rank: int, channel: Channel) -> Channel:
    """The channel of the other ranks on which the other part of this one's operations is launched."""
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
        f"of {group_name(channel)}"
        if channel.peer is None
        else f"between ranks {low} and {high} of {group_name(channel)}"
    )
    lines = [f"mismatch: operation #{seq} {what} is not the same on ranks {low} and {high}"]
    for rank, _, text in pair:
        snapshot = snapshots[rank]
        where = f", waiting at {place(snapshot.where)}" if snapshot.state == "waiting" else f" ({snapshot.state})"
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
    lines += describe({rank: snapshots[rank] for rank in involved})
    lines += _reason(hopeless, snapshots)
    return Verdict("deadlock", stuck, "\n".join(lines))


def _reason(hopeless: Mapping[int, list[int]], snapshots: Mapping[int, Snapshot]) -> list[str]:
    """One sentence: a rank that ended without its part, or who waits for whom in a circle."""
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
    """What the other rank would have to launch, in words."""
    channel = snapshot.channel
    if channel.peer is None:
        return f"{snapshot.operation.split(' ')[0]} #{snapshot.seq} of '{channel.use}'"
    if channel.kind == "send":
        return f"recv #{snapshot.seq} from rank {rank} of '{channel.use}'"
    return f"send #{snapshot.seq} to rank {rank} of '{channel.use}'"
