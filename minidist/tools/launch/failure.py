"""The errors of a job: one rank's exception, and the failure of the whole job."""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import RunError


class RankError(NamedTuple):
    """An exception that one rank raised, in the form in which the rank sends it to the launcher.

    kind: name of its class; where: `file:line in function` of the innermost frame in the user's code; traceback:
    without the launcher's frames. exit_code: of the exception class, for errors that set the command's exit code.
    is_connection_error: whether the communication backend raised it, as it does when another rank has died.
    """

    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int | None = None
    is_connection_error: bool = False


class RankFailure(RunError):
    """Ranks raised, died, deadlocked or missed the deadline; `str()` is the report for the user.

    kind: "raised", "died", "deadlock", "mismatch", "hang", "deadline", "server" (it died) or "killed". ranks: those
    that failed.
    tracebacks, stacks (innermost call first): by rank, where known. output: of each rank.
    """

    def __init__(self, kind: str, ranks: Sequence[int], report: str):
        super().__init__(report)
        self.kind, self.ranks = kind, tuple(ranks)
        self.tracebacks: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self.output: list[str] = []
