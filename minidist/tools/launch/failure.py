"""The errors of a job: one rank's exception, and the failure of the whole job."""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import RunError


class RankError(NamedTuple):
    """An exception that one rank raised, as the rank sends it to the launcher.

    kind: the name of the exception's class. message: its text. where: `file:line in function` of the innermost frame in
    the user's code, "" if there is none. traceback: the traceback as text, without the launcher's frames. exit_code:
    the `exit_code` of a UserError or RunError; None for other exceptions. is_connection_error: whether the
    communication backend raised the exception, as it does when another rank has died.
    """

    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int | None = None
    is_connection_error: bool = False


class RankFailure(RunError):
    """A job failed: ranks raised, died, deadlocked, hung or missed the deadline.

    kind: "raised", "died", "deadlock", "mismatch" (ranks launched different operations), "hang", "deadline", "server"
    (the rank server died) or "killed" (by `Job.kill`). ranks: the ranks that failed. report: the text for the user, as
    in `str()`. tracebacks: rank -> traceback of its exception; stacks: rank -> its Python stack, innermost call first;
    both are text, of the ranks that sent one. output: stdout and stderr of each rank.
    """

    def __init__(self, kind: str, ranks: Sequence[int], report: str):
        super().__init__(report)
        self.kind, self.ranks = kind, tuple(ranks)
        self.tracebacks: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self.output: list[str] = []
