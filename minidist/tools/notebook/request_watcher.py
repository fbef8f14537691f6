"""Waits for the answers of live ranks, and explains why missing ones will not come."""

import time
from collections.abc import Callable

from minidist.errors import format_ranks
from minidist.tools.deadlock.detector import find_operation_mismatch
from minidist.tools.deadlock.status_page import ChannelProgress, Snapshot
from minidist.tools.deadlock.status_report import describe_rank
from minidist.tools.launch.live_job import LiveJob
from minidist.tools.notebook.blocked_in_torch import BlockedRankDetector
from minidist.tools.notebook.result import adapt_report_to_notebook, format_cell_lines, format_latest_output

_POLL_S = 0.05
_MAX_UNMATCHED = 3
_NO_PROGRESS = ChannelProgress(0, ())
_SHOW_S = 0.5  # between two looks at what was printed
_GRACE_DIED_S = 0.15  # after a death, to report others that die of the same cause with it


class RequestWatcher:
    """Sends a request, such as to run a cell, to live ranks, and waits until all have answered or cannot answer.

    It detects deadlocks, deaths, silence, too much output and Ctrl-C. quiet_s: seconds without output or a change of
    any rank's status after which the request counts as failed. timeout_s: limit in seconds for the whole request; None
    for no limit. show: called about twice a second, if ranks have printed something new, with their latest output as
    text.
    """

    def __init__(
        self, job: LiveJob, quiet_s: float, timeout_s: float | None, show: Callable[[str], None] | None = None
    ):
        self._job, self._quiet_s, self._timeout_s, self._show = job, quiet_s, timeout_s, show
        self._last_show_time, self._shown = time.monotonic(), [0] * job.size

    def run_request(self, message: tuple, interrupts: list) -> tuple[str, str]:
        """Send a request to all ranks and wait for it; return ("done", ""), or the kind of failure and its explanation.

        message: the name of a `RankSession` method and its arguments. interrupts: a list to which the caller's signal
        handler appends on Ctrl-C; once it is not empty, the wait ends with the kind "stopped". The kinds are those of
        `CellResult`. Ranks that have not answered are left as they are.
        """
        job = self._job
        job.send_request(message)
        start_s = last_change_time = time.monotonic()
        before = None
        detector = BlockedRankDetector(job) if message[0] == "run_cell" else None  # reconnecting may take any time
        while not job.all_answered:
            job.poll(_POLL_S)
            now_s, seen = time.monotonic(), self._snapshot_progress()
            last_change_time, before = (last_change_time, before) if seen == before else (now_s, seen)
            if job.dead_ranks:
                return self._report_deaths()
            if job.all_answered:
                break
            self._show_new_output(now_s)
            if job.diagnosis is not None:
                return job.diagnosis.kind, self._explain_diagnosis(str(job.diagnosis))
            if interrupts:
                return "stopped", "\n".join(["stopped; the ranks stood here:", *self._describe_positions()])
            if any(rank.dropped_bytes for rank in job.ranks):
                return "flood", "\n".join(
                    ["a rank printed more than is kept; it was stopped", *self._describe_positions()]
                )
            if detector and detector.all_ranks_blocked(last_change_time) and not job.all_answered:
                head = "deadlock: every rank waits inside torch or has reached the end; the ranks stand here:"
                return "deadlock", "\n".join(
                    [head, *self._describe_positions(), *_describe_unmatched_collectives(job.last_snapshots())]
                )
            if now_s - last_change_time > self._quiet_s:
                more = f"if this is work that takes long, start the cell with %%ranks --quiet {4 * self._quiet_s:g}"
                head = f"nothing has moved for {self._quiet_s:g} s; the ranks stand here:"
                return "quiet", "\n".join(
                    [
                        head,
                        *self._describe_positions(),
                        *(_describe_unmatched_collectives(job.last_snapshots()) or [more]),
                    ]
                )
            if self._timeout_s is not None and now_s - start_s > self._timeout_s:
                head = f"the cell was not done after {self._timeout_s:g} s; the ranks stand here:"
                return "deadline", "\n".join([head, *self._describe_positions()])
        # gloo does not notice that one rank sums what another takes the maximum of.
        if diagnosis := find_operation_mismatch(job.last_snapshots()):
            return diagnosis.kind, adapt_report_to_notebook(str(diagnosis))
        return "done", ""

    def _show_new_output(self, now_s: float) -> None:
        """Show the latest output if there is new output and the last display was long enough ago."""
        printed = [rank.output_bytes for rank in self._job.ranks]
        if self._show is not None and now_s - self._last_show_time >= _SHOW_S and printed != self._shown:
            self._last_show_time, self._shown = now_s, printed
            self._show(format_latest_output([rank.output for rank in self._job.ranks]))

    def _snapshot_progress(self) -> list:
        """Return a value that changes when an unanswered rank prints or changes its status; [] after a death."""
        job = self._job
        if job.dead_ranks:
            return []
        versions = {n: snapshot.version for n, snapshot in job.last_snapshots().items()}
        return [(n, versions.get(n), job.ranks[n].output_bytes) for n in range(job.size) if n not in job.answers]

    def _report_deaths(self) -> tuple[str, str]:
        """Wait briefly for further deaths; return ("died", the report)."""
        end_s = time.monotonic() + _GRACE_DIED_S
        while not self._job.has_ended and time.monotonic() < end_s:
            self._job.poll(_GRACE_DIED_S)
        return "died", adapt_report_to_notebook(self._job.describe_deaths())

    def _explain_diagnosis(self, text: str) -> str:
        """Return a diagnosis's text, with the lines of the cell if the ranks wait in other files."""
        lines = adapt_report_to_notebook(text)
        return (
            lines
            if " of cell " in lines
            else "\n".join([lines, "in the cell:", *self._describe_cell_lines(self._unanswered_ranks())])
        )

    def _unanswered_ranks(self) -> list[int]:
        """Return the ranks that have not answered the request."""
        return [n for n in range(self._job.size) if n not in self._job.answers]

    def _describe_cell_lines(self, ranks: list[int]) -> list[str]:
        """Return lines that say which line of the cell each of these ranks executes."""
        return format_cell_lines(self._job.dump_stacks(), ranks)

    def _describe_positions(self) -> list[str]:
        """Describe where each rank is: the operation in its status, or the line in its stack."""
        snapshots = self._job.last_snapshots()
        waiting = {n: s for n, s in snapshots.items() if s.state == "waiting"}
        lines = [
            f"  {format_ranks([n])}: {adapt_report_to_notebook(describe_rank(s))}" for n, s in sorted(waiting.items())
        ]
        ended = sorted(self._job.answers)
        running = [n for n in self._unanswered_ranks() if n not in waiting]
        lines += self._describe_cell_lines(running) if running else []
        return lines + ([f"  {format_ranks(ended)}: reached the end of the cell"] if ended else [])


def _describe_unmatched_collectives(statuses: dict[int, Snapshot]) -> list[str]:
    """Describe the collectives that some ranks have begun and other ranks of the group have not; [] without any.

    statuses: by rank. For ranks blocked in C++, as at the end of DDP's backward, this is all that their status shows.
    """
    lines = []
    for channel in dict.fromkeys(channel for status in statuses.values() for channel in status.progress_by_channel):
        if channel.peer is None:
            counts = {
                n: statuses[n].progress_by_channel.get(channel, _NO_PROGRESS).num_launched
                for n in channel.ranks
                if n in statuses
            }
            begun = [n for n, count in counts.items() if count > min(counts.values())]
            if begun:
                seq, progress = min(counts.values()) + 1, statuses[begun[0]].progress_by_channel[channel]
                at = seq - progress.num_launched - 1  # from the end
                name = progress.recent_operations[at][1] if -at <= len(progress.recent_operations) else "an operation"
                late = [n for n in counts if n not in begun]
                lines.append(
                    f"  {name} #{seq} of '{channel.group_name}': "
                    f"begun by {format_ranks(begun)}, not by {format_ranks(late)}"
                )
    return ["operations that wait for others:", *lines[:_MAX_UNMATCHED]] if lines else []


def all_operations_matched(statuses: dict[int, Snapshot]) -> bool:
    """Return whether every collective and transfer that a rank has launched was launched by all its partners, too.

    If so, the process groups are still usable. statuses: the status of each rank, by rank.
    """
    counts = {
        n: {channel: p.num_launched for channel, p in status.progress_by_channel.items()}
        for n, status in statuses.items()
    }
    for n, channels in counts.items():
        for channel, launched in channels.items():
            other = channel
            if channel.peer is not None:
                other = channel._replace(kind="recv" if channel.kind == "send" else "send", peer=n)
            partners = channel.ranks if channel.peer is None else [channel.peer]
            if any(counts.get(m, {}).get(other, 0) != launched for m in partners):
                return False
    return True
