"""Rank status: which operations a rank has launched and which one it waits for.

Collectives, transfers and `bind` report here. The class below only numbers the operations, which is all that the core
needs. `tools/deadlock/status_page.py` implements the same interface in shared memory, so that another process can see
where every rank waits.
"""

from collections import Counter
from typing import NamedTuple


class Channel(NamedTuple):
    """An ordered sequence of operations: the collectives of a group, or the transfers one way between two ranks.

    kind: "collective", "send" or "recv"; use: the group's purpose; ranks: its global ranks; peer: the other global rank
    of a transfer; tag: the tag of a transfer.
    """

    kind: str
    use: str
    ranks: tuple[int, ...]
    peer: int | None = None
    tag: int = 0


class RankStatus:
    """The interface, and its default: it numbers the operations of each channel and reports nothing to anybody."""

    def __init__(self):
        self._launched: Counter[Channel] = Counter()

    def launch(self, channel: Channel, name: str, shape: tuple[int, ...], dtype: object) -> int:
        """Record that an operation is about to start; return its sequence number on the channel: 1, 2, ..."""
        self._launched[channel] += 1
        return self._launched[channel]

    def wait(self, channel: Channel, seq: int, name: str, shape: tuple[int, ...], dtype: object) -> None:
        """Record that this rank blocks from now on until operation `seq` of the channel has completed."""

    def resume(self) -> None:
        """Record that the wait has ended."""
