"""The errors of a job: one rank's exception, and the failure of the whole job."""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import RunError


class RankError(NamedTuple):
    """An exception that one rank raised, in the form in which the rank sends it to the launcher.

    kind: the name of the exception's class; message: its text; where: `file:line in function` of the innermost frame in
    the user's code; traceback: the traceback without the launcher's frames. exit_code: the `exit_code` of an error of
    this package; None for other exceptions. is_connection_error: whether the communication backend raised it, as it
    does when another rank has died.
    """

    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int | None = None
    is_connection_error: bool = False


class RankFailure(RunError):
    """Ranks raised, died, deadlocked or missed the deadline; `str()` is the report for the user.

    kind: "raised", "died", "deadlock", "mismatch", "hang", "deadline", "server" (the rank server died) or "killed".
    ranks: the ranks that failed.
    tracebacks, stacks (innermost call first): texts by rank, for the ranks that sent one. output: stdout and stderr of
    each rank.
    """

    def __init__(self, kind: str, ranks: Sequence[int], report: str):
        super().__init__(report)
        self.kind, self.ranks = kind, tuple(ranks)
        self.tracebacks: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self.output: list[str] = []
