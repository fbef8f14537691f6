"""Waiting for what live ranks answer, and saying why the rest will not come."""

import time
from collections.abc import Callable

from minidist.errors import format_ranks
from minidist.tools.deadlock.detector import find_mismatch
from minidist.tools.deadlock.status_page import Progress, Snapshot
from minidist.tools.deadlock.status_report import describe_rank
from minidist.tools.launch.live_job import LiveJob
from minidist.tools.notebook.blocked import Still
from minidist.tools.notebook.result import in_the_cell, lines_of_cell, so_far

_LOOK_S = 0.05
_MAX_UNMATCHED = 3
_NOTHING = Progress(0, ())
_SHOW_S = 0.5  # between two looks at what was printed
_TOGETHER_S = 0.15  # after a death, for others that die of the same cause


class Watch:
    """Waits for the answers to one message, and finds out when they will not come.

    show: called with what the ranks have printed so far, now and then, while they work on.
    """

    def __init__(
        self, job: LiveJob, quiet_s: float, timeout_s: float | None, show: Callable[[str], None] | None = None
    ):
        self._job, self._quiet_s, self._timeout_s, self._show = job, quiet_s, timeout_s, show
        self._shown_s, self._shown = time.monotonic(), [0] * job.size

    def ask(self, message: tuple, pressed: list) -> tuple[str, str]:
        """("done", ""), or what is wrong and its explanation. pressed: not empty once the person wants it to stop."""
        job = self._job
        job.send_request(message)
        start_s = moved_s = time.monotonic()
        before, still = None, Still(job) if message[0] == "run" else None  # ranks may meet anew as slowly as they like
        while not job.all_answered:
            job.poll(_LOOK_S)
            now_s, seen = time.monotonic(), self._seen()
            moved_s, before = (moved_s, before) if seen == before else (now_s, seen)
            if job.dead_ranks:
                return self._died()
            if job.all_answered:
                break
            self._show_more(now_s)
            if job.verdict is not None:
                return job.verdict.kind, self._explained(str(job.verdict))
            if pressed:
                return "stopped", "\n".join(["stopped; the ranks stood here:", *self._places()])
            if any(rank.dropped_bytes for rank in job.ranks):
                return "flood", "\n".join(["a rank printed more than is kept; it was stopped", *self._places()])
            if still and still.look(moved_s) and not job.all_answered:
                head = "deadlock: every rank waits inside torch or has reached the end; the ranks stand here:"
                return "deadlock", "\n".join([head, *self._places(), *unmatched(job.last_snapshots())])
            if now_s - moved_s > self._quiet_s:
                more = f"if this is work that takes long, start the cell with %%ranks --quiet {4 * self._quiet_s:g}"
                head = f"nothing has moved for {self._quiet_s:g} s; the ranks stand here:"
                return "quiet", "\n".join([head, *self._places(), *(unmatched(job.last_snapshots()) or [more])])
            if self._timeout_s is not None and now_s - start_s > self._timeout_s:
                head = f"the cell was not done after {self._timeout_s:g} s; the ranks stand here:"
                return "deadline", "\n".join([head, *self._places()])
        # gloo lets one rank sum what another takes the largest of, and tells nobody.
        if verdict := find_mismatch(job.last_snapshots()):
            return verdict.kind, in_the_cell(str(verdict))
        return "done", ""

    def _show_more(self, now_s: float) -> None:
        printed = [rank.output_bytes for rank in self._job.ranks]
        if self._show is not None and now_s - self._shown_s >= _SHOW_S and printed != self._shown:
            self._shown_s, self._shown = now_s, printed
            self._show(so_far([rank.output for rank in self._job.ranks]))

    def _seen(self) -> list:
        job = self._job
        if job.dead_ranks:
            return []
        versions = {n: snapshot.version for n, snapshot in job.last_snapshots().items()}
        return [(n, versions.get(n), job.ranks[n].output_bytes) for n in range(job.size) if n not in job.answers]

    def _died(self) -> tuple[str, str]:
        end_s = time.monotonic() + _TOGETHER_S
        while not self._job.done and time.monotonic() < end_s:
            self._job.poll(_TOGETHER_S)
        return "died", in_the_cell(self._job.describe_deaths())

    def _explained(self, text: str) -> str:
        """A verdict, with the lines of the cell where the waits are in other files."""
        told = in_the_cell(text)
        return told if " of cell " in told else "\n".join([told, "in the cell:", *self._lines(self._pending())])

    def _pending(self) -> list[int]:
        return [n for n in range(self._job.size) if n not in self._job.answers]

    def _lines(self, ranks: list[int]) -> list[str]:
        return lines_of_cell(self._job.dump_stacks(), ranks)

    def _places(self) -> list[str]:
        """Where every rank stands: the wait that its status shows, or the line that its stack shows."""
        standing = self._job.last_snapshots()
        waiting = {n: s for n, s in standing.items() if s.state == "waiting"}
        told = [f"  {format_ranks([n])}: {in_the_cell(describe_rank(s))}" for n, s in sorted(waiting.items())]
        ended = sorted(self._job.answers)
        running = [n for n in self._pending() if n not in waiting]
        told += self._lines(running) if running else []
        return told + ([f"  {format_ranks(ended)}: reached the end of the cell"] if ended else [])


def unmatched(statuses: dict[int, Snapshot]) -> list[str]:
    """The operations that some ranks have begun and others they need have not, in words.

    Of waits in C++ (the end of DDP's backward) rank status shows nothing but this.
    """
    told = []
    for channel in dict.fromkeys(channel for status in statuses.values() for channel in status.progress):
        if channel.peer is None:
            counts = {n: statuses[n].progress.get(channel, _NOTHING).launched for n in channel.ranks if n in statuses}
            begun = [n for n, count in counts.items() if count > min(counts.values())]
            if begun:
                seq, progress = min(counts.values()) + 1, statuses[begun[0]].progress[channel]
                at = seq - progress.launched - 1  # from the end
                name = progress.recent[at][1] if -at <= len(progress.recent) else "an operation"
                late = [n for n in counts if n not in begun]
                told.append(
                    f"  {name} #{seq} of '{channel.use}': begun by {format_ranks(begun)}, not by {format_ranks(late)}"
                )
    return ["operations that wait for others:", *told[:_MAX_UNMATCHED]] if told else []


def balanced(statuses: dict[int, Snapshot]) -> bool:
    """Whether every operation that a rank launched was launched by its partners too: then the groups are usable."""
    counts = {n: {channel: p.launched for channel, p in status.progress.items()} for n, status in statuses.items()}
    for n, channels in counts.items():
        for channel, launched in channels.items():
            other = channel
            if channel.peer is not None:
                other = channel._replace(kind="recv" if channel.kind == "send" else "send", peer=n)
            partners = channel.ranks if channel.peer is None else [channel.peer]
            if any(counts.get(m, {}).get(other, 0) != launched for m in partners):
                return False
    return True
