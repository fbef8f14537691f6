"""The status of ranks in words, one line for all ranks in the same state."""

from collections.abc import Mapping

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import Snapshot

_MAX_LINES = 6


def describe_ranks(snapshots: Mapping[int, Snapshot | None]) -> list[str]:
    """Return one line for each distinct status, naming the ranks that share it."""
    same: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        same.setdefault(describe_rank(snapshot), []).append(rank)
    lines = [f"  {format_ranks(ranks)}: {text}" for text, ranks in same.items()]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  ... and {len(lines) - _MAX_LINES} more"]
    return lines


def describe_rank(snapshot: Snapshot | None) -> str:
    """Describe the status of one rank."""
    if snapshot is None or snapshot.state == "idle":
        return "starting"
    if snapshot.state != "waiting":
        return snapshot.state
    if snapshot.channel is None:
        return f"waiting in {snapshot.operation} at {short_location(snapshot.where)}"
    channel = snapshot.channel
    name, _, rest = snapshot.operation.partition(" ")
    peer = "" if channel.peer is None else f" {'to' if channel.kind == 'send' else 'from'} rank {channel.peer}"
    peer += f" (tag {channel.tag})" if channel.tag else ""
    tensor = "" if name == "barrier" else f" {rest}"  # a barrier has no tensor of its own
    operation = f"{name}{peer} #{snapshot.seq}{tensor} of {format_group(channel)}"
    return f"waiting in {operation} at {short_location(snapshot.where)}"


def short_location(where: str) -> str:
    """Return the last two parts of the path in a `file:line`."""
    parts = where.rsplit("/", 2)
    return "/".join(parts[-2:])


def format_group(channel: Channel) -> str:
    """Name the group of a channel: `'grads' (ranks 0-3)`."""
    return f"'{channel.use}' ({format_ranks(channel.ranks)})"
