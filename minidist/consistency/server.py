"""The parameter server of asynchronous training: it updates, and decides when each worker's request is answered.

`minidist.consistency.asynchronous` carries requests and answers between the ranks. `minidist.simple.consistency` has
a server with the same interface, and the workers of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


class Pull:
    """A worker's request for the parameters; the server's answer is a copy of them."""


@dataclass(frozen=True, eq=False)
class Push:
    """A worker's request to apply its gradient; the server's answer is None."""

    gradient: Tensor


class Server:
    """A parameter server for workers of different speeds. Its caller carries requests and answers.

    update: applies one gradient to the parameters, in place. bound: how many pushes a worker may be ahead of the
    slowest one; None: any number. The parameters of a worker's pull number c, from 0, contain every worker's pushes
    before number c - bound, and none from number c + bound on. With bound 0 these are exactly the pushes before c:
    synchronous training, for SGD.

    staleness: for each update, the number of other updates since its worker's pull was answered.
    """

    def __init__(
        self,
        parameters: Tensor,
        update: Callable[[Tensor, Tensor], None],
        num_workers: int,
        bound: int | None = None,
    ):
        self.parameters = parameters
        self.staleness = list[int]()
        self._bound = bound
        self._update = update
        self._num_pulls = dict.fromkeys(range(num_workers), 0)
        self._num_pushes = dict.fromkeys(range(num_workers), 0)
        self._pulled_after: dict[int, int] = {}  # number of updates at each worker's last pull
        self._waiting: dict[int, Pull | Push] = {}  # in the order of arrival

    def handle(self, worker: int, request: Pull | Push) -> list[tuple[int, Tensor | None]]:
        """Accept a worker's request; return all answers that are due now, as (worker, answer).

        A request that would exceed the bound is answered by a later call, when other workers have caught up.
        """
        self._waiting[worker] = request
        answers = []
        while due := [each for each, waiting in self._waiting.items() if self._is_due(each, waiting)]:
            answers.append((due[0], self._answer(due[0], self._waiting.pop(due[0]))))
        return answers

    def _is_due(self, worker: int, request: Pull | Push) -> bool:
        """Whether the staleness bound allows to answer a worker's request now."""
        if self._bound is None:
            return True
        if isinstance(request, Pull):
            return self._num_pushes[worker] - min(self._num_pushes.values()) <= self._bound
        # A worker that has yet to pull must not see an update from too far in its future.
        return self._num_pushes[worker] + 1 - min(self._num_pulls.values()) <= self._bound

    def _answer(self, worker: int, request: Pull | Push) -> Tensor | None:
        """Apply a push or copy the parameters for a pull; return the answer to the worker."""
        if isinstance(request, Pull):
            self._num_pulls[worker] += 1
            self._pulled_after[worker] = len(self.staleness)
            return self.parameters.clone()
        self._num_pushes[worker] += 1
        self._update(self.parameters, request.gradient)
        self.staleness.append(len(self.staleness) - self._pulled_after[worker])
        return None
