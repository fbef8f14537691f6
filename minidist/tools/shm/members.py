"""The ranks of one group as this rank sees them: connections, lanes, and how it all ends."""

import contextlib
import time
from collections.abc import Callable

from minidist.tools.shm.collectives import Collectives
from minidist.tools.shm.lane import Lane
from minidist.tools.shm.neighbours import Neighbours, ProcessDescriptor
from minidist.tools.shm.rendezvous import Meeting, ShmError
from minidist.tools.shm.transfer import Transfers

_LINGER_S = 2.0  # that work on its way may take to end after the group is destroyed
_STEP_S = 0.002


class Members:
    """Everything a group has.

    left: called when the group is closed, with whether it was the last of this process.
    """

    def __init__(self, here: Neighbours, meeting: Meeting, tokens: list[str], pids: list[int | None], name: str, left):
        self.meeting, self.workers = meeting, here.workers
        self.rank, self.size = meeting.rank, meeting.size
        self._here, self._left, self._open = here, left, True
        self.lane = Lane(here.workers)
        self.collectives = Collectives(here, meeting, [here.memory(token) for token in tokens])
        self.transfers = Transfers(here, meeting, tokens, name)
        self._channels: dict[tuple[str, int, int], Lane] = {}
        self._processes: list[ProcessDescriptor | None] = []
        here.enter()
        for other, sock in meeting.others:
            here.watch(sock, lambda other=other: self._lost(other, "has left"))
            self._processes.append(here.watch_process(pids[other], lambda other=other: self._lost(other, "has ended")))

    def collective(self, call: Callable[[], None]) -> None:
        """Run one collective. An error of any kind ends the group: its ranks are no longer at the same place."""
        self.meeting.count += 1
        if self.meeting.broken:
            raise ShmError(self.meeting.broken)
        try:
            call()
        except BaseException as error:
            self.meeting.break_off(str(error) or type(error).__name__)
            raise

    def channel(self, kind: str, peer: int, tag: int) -> Lane:
        """The lane of the transfers one way with one rank under one tag."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{kind}: rank {self.rank} of {self.meeting} has no peer {peer}")
        return self._channels.setdefault((kind, peer, tag), Lane(self.workers))

    def check_open(self) -> None:
        if not self._open:
            raise ShmError(f"{self.meeting} was destroyed")

    def set_timeout(self, seconds: float) -> None:
        self.meeting.set_timeout(seconds)

    def _lost(self, other: int, how: str) -> None:
        name = f"rank {self.meeting.ranks[other]}"
        self.meeting.lose(other, f"{name} has left {self.meeting}" if how == "has left" else f"{name} has ended")
        self.transfers.lose(other)

    def close(self, patience_s: float = _LINGER_S) -> None:
        """Leave. Work on its way gets a moment to end; what does not, ends in an error."""
        if not self._open:
            return
        self._open = False
        lanes = [self.lane, *self._channels.values()]
        self._let_end(lanes, patience_s)
        gone = ShmError(f"{self.meeting} was destroyed before this was done")
        for lane in lanes:
            lane.fail(gone)
        for _, sock in self.meeting.others:
            with contextlib.suppress(OSError):
                self._here.forget(sock.fileno())
        for process in self._processes:
            self._here.forget_process(process)
        self.meeting.cut()
        self.transfers.close()
        self._let_end(lanes, _LINGER_S)
        self.transfers.drop()
        self._here.retire([sock for _, sock in self.meeting.others], self.collectives.leases)
        self._left(self._here.leave())

    def _let_end(self, lanes: list[Lane], seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not all(lane.quiet for lane in lanes):
            time.sleep(_STEP_S)
