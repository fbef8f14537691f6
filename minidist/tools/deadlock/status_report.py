"""The status of ranks in words, one line for all ranks in the same state."""

from collections.abc import Mapping

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.status_page import Snapshot

_MAX_LINES = 6


def describe_ranks(snapshots: Mapping[int, Snapshot | None]) -> list[str]:
    """Return the status of ranks as lines of text; ranks of equal status share a line. At most seven lines.

    snapshots: the status of each rank, by global rank; None for a rank whose status could not be read.
    """
    same: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        same.setdefault(describe_rank(snapshot), []).append(rank)
    lines = [f"  {format_ranks(ranks)}: {text}" for text, ranks in same.items()]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  ... and {len(lines) - _MAX_LINES} more"]
    return lines


def describe_rank(snapshot: Snapshot | None) -> str:
    """Return one rank's status as text, such as "waiting in barrier #3 of 'grads' (ranks 0-3) at train.py:7".

    A rank without a readable snapshot (None) is described as "starting".
    """
    if snapshot is None or snapshot.state == "idle":
        return "starting"
    if snapshot.state not in ("waiting", "pending"):
        return snapshot.state
    verb = "waiting in" if snapshot.state == "waiting" else "running, but the GPU has not completed"
    if snapshot.wait_channel is None:
        return f"{verb} {snapshot.wait_operation} at {shorten_location(snapshot.wait_location)}"
    channel = snapshot.wait_channel
    name, _, rest = snapshot.wait_operation.partition(" ")
    peer = "" if channel.peer is None else f" {'to' if channel.kind == 'send' else 'from'} rank {channel.peer}"
    peer += f" (tag {channel.tag})" if channel.tag else ""
    tensor = "" if name == "barrier" else f" {rest}"  # a barrier has no tensor of its own
    operation = f"{name}{peer} #{snapshot.wait_seq}{tensor} of {format_group(channel)}"
    return f"{verb} {operation} at {shorten_location(snapshot.wait_location)}"


def shorten_location(location: str) -> str:
    """Return a "file:line" with the last two parts of its path only: "minidist/train.py:7"."""
    parts = location.rsplit("/", 2)
    return "/".join(parts[-2:])


def format_group(channel: Channel) -> str:
    """Return the name and the ranks of the channel's process group as text: "'grads' (ranks 0-3)"."""
    return f"'{channel.group_name}' ({format_ranks(channel.ranks)})"
