"""A rank's error, and the error that tells of all of them."""

from collections.abc import Sequence
from typing import NamedTuple

from minidist.errors import RunError


class RankError(NamedTuple):
    """An exception of one rank, as it travels.

    kind: name of its class; where: `file:line in function` of the person's innermost own frame; traceback: without the
    launcher's frames. exit_code: of the exception class, for errors that say how the command ends. from_network: the
    backend gave up, as it does when a peer is gone.
    """

    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int | None = None
    from_network: bool = False


class RankFailure(RunError):
    """Ranks raised, died, deadlocked or took too long; `str()` is the report for a person.

    kind: "raised", "died", "deadlock", "mismatch", "deadline", "server" (it died) or "killed". ranks: those concerned.
    tracebacks, stacks (innermost call first): by rank, where known, the person's own frames. output: by rank.
    """

    def __init__(self, kind: str, ranks: Sequence[int], report: str):
        super().__init__(report)
        self.kind, self.ranks = kind, tuple(ranks)
        self.tracebacks: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self.output: list[str] = []
