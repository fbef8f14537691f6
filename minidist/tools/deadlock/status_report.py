"""Where ranks stand, in words. Ranks that stand alike share a line."""

from collections.abc import Mapping

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import Snapshot

_MAX_LINES = 6


def describe(snapshots: Mapping[int, Snapshot | None]) -> list[str]:
    """A line for every way of standing, ranks that stand alike merged."""
    same: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        same.setdefault(stands(snapshot), []).append(rank)
    lines = [f"  {format_ranks(ranks)}: {text}" for text, ranks in same.items()]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  ... and {len(lines) - _MAX_LINES} more"]
    return lines


def stands(snapshot: Snapshot | None) -> str:
    """Where one rank stands, in words."""
    if snapshot is None or snapshot.state == "idle":
        return "starting"
    if snapshot.state != "waiting":
        return snapshot.state
    if snapshot.channel is None:
        return f"waiting in {snapshot.operation} at {place(snapshot.where)}"
    channel = snapshot.channel
    name, _, rest = snapshot.operation.partition(" ")
    peer = "" if channel.peer is None else f" {'to' if channel.kind == 'send' else 'from'} rank {channel.peer}"
    peer += f" (tag {channel.tag})" if channel.tag else ""
    tensor = "" if name == "barrier" else f" {rest}"  # a barrier has no tensor of its own
    return f"waiting in {name}{peer} #{snapshot.seq}{tensor} of {group_name(channel)} at {place(snapshot.where)}"


def place(where: str) -> str:
    """The last two parts of a `file:line`."""
    parts = where.rsplit("/", 2)
    return "/".join(parts[-2:])


def group_name(channel: Channel) -> str:
    """`'grads' (ranks 0-3)`."""
    return f"'{channel.use}' ({format_ranks(channel.ranks)})"
