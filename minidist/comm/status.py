"""Rank status: which operations a rank has launched and which one it waits for.

Collectives, transfers and `bind` report here. The class below only numbers the operations, which is all that the core
needs. `tools/deadlock/status_page.py` implements the same interface in shared memory, so that another process can see
where every rank waits.
"""

from collections import Counter
from typing import NamedTuple


class Channel(NamedTuple):
    """A numbered sequence of operations: all collectives of a group, or one rank's sends to (or recvs from) a peer.

    kind: "collective", "send" or "recv". group_name: name of the group. ranks: global ranks of the group. peer: global
    rank at the other end of a transfer; None for collectives. tag: the transfers' tag, as in `send`; 0 for collectives.
    """

    kind: str
    group_name: str
    ranks: tuple[int, ...]
    peer: int | None = None
    tag: int = 0

    def __hash__(self) -> int:
        """Hash without the ranks: a tuple of thousands would be hashed anew at every launch."""
        return hash((self.kind, self.group_name, len(self.ranks), self.peer, self.tag))


class OperationTracker:
    """Tracks a rank's communication: numbers the operations that the rank launches on each `Channel`.

    `comm` calls a tracker at every launch, and at the start and the end of every wait. This class ignores the waits.
    Subclasses publish launches and waits, so that deadlock detection can see where the rank waits.
    """

    def __init__(self):
        self._launched: Counter[Channel] = Counter()

    def on_launch(self, channel: Channel, name: str, shape: tuple[int, ...], dtype: object) -> int:
        """Record that an operation is about to start; return its sequence number on the channel: 1, 2, ...

        name: the operation's name, with its root or reduction. shape, dtype: those of its tensor. Name, dtype and
        number of elements must be equal on all ranks of the channel; the number may differ in an all-to-all.
        """
        self._launched[channel] += 1
        return self._launched[channel]

    def reset_channels(self) -> None:
        """Number the operations of all channels from 1 again, because new groups replace the present ones."""
        self._launched.clear()

    def on_wait(self, channel: Channel, seq: int, name: str, shape: tuple[int, ...], dtype: object) -> None:
        """Record that this rank blocks from now on until operation `seq` of the channel has completed.

        seq: the number that `on_launch` returned. name, shape, dtype: as in `on_launch`.
        """

    def on_pending(self, channel: Channel, seq: int, name: str, shape: tuple[int, ...], dtype: object, work) -> None:
        """Record that the wait for operation `seq` has returned on the host, while the GPU may still be running it.

        The other arguments are as in `on_wait`. work: torch's handle, whose `is_completed()` tells when the GPU is
        done.
        """

    def on_resume(self) -> None:
        """Record that the wait reported last has ended: this rank runs again."""


class LaunchOnlyTracker(OperationTracker):
    """Passes launches on to another tracker and drops waits: for helper threads that communicate beside training.

    Rank status describes the waits of one thread, the one that trains; launches of all threads count in it.
    status: the rank's tracker.
    """

    def __init__(self, status: OperationTracker):
        self._status = status

    def on_launch(self, channel: Channel, name: str, shape: tuple[int, ...], dtype: object) -> int:
        """Record that an operation is about to start; return its sequence number, as in `OperationTracker`."""
        return self._status.on_launch(channel, name, shape, dtype)
