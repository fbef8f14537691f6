"""A server with a staleness bound: the solution, as it stands in minidist.consistency.simple.

Without a bound a slow worker may push a gradient of parameters that are arbitrarily old. With a bound s its gradient
misses at most the last s clocks of the others, and the fast workers wait only when they are s clocks ahead (SSP, Ho
et al. 2013). Bound 0 is synchronous training: each pull sees exactly the pushes of the clocks before.

Most implementations let only pulls wait. Then a slow worker's pull may see pushes of its own future, which does no
harm in practice, but bound 0 would not be synchronous training, and two runs could not be compared. An answer changes
the counts, so others may become due: a pull can release a push, and this push a pull. A worker that has left must not
be the slowest one for ever.

Usual wrong answers:
* compares with the mean of all clocks, and not with the slowest one
* the package's own
* takes every request for due, whatever the bound
* counts from the arrival of a pull, and not from its answer: updates that a waiting pull still sees count as stale
* decides who is due before it answers, once: an answer makes others due, which are not looked at
* keeps the clock of a worker that has left: all others wait for it for ever
* returns at once when a worker leaves, although its leaving may release others
* answers a pull with the parameters themselves, which change while the worker computes
* a worker may be bound + 1 clocks ahead
* a worker may be bound - 1 clocks ahead: with bound 0 nobody gets an answer
* goes through the waiting requests once: an answer that makes an earlier request due does not release it
* lets only pulls wait: a slow worker sees pushes of its own future
* lets only pushes wait: a pull misses pushes that it must see
* answers in the order of the workers' numbers, and not of arrival
* looks at the new request only: those that wait are never answered
* compares a push with the pushes of the others: a worker that has pushed and not yet pulled sees too much
* answers a push with the new parameters, which the worker has not requested
* bounds the number of updates since the worker's pull, and not its lead in clocks
* counts from the worker's last push, and not from its pull
* counts the update itself among those in between
* answers nobody
"""

from torch import Tensor

from minidist.consistency.simple import Pull, Push, Update


class Server:
    """A parameter server for workers of different speeds. Its caller transports requests and answers.

    update: applies one gradient to the parameters. bound: how many clocks (pushes) a worker may be ahead of the slowest
    one; None: any number. Pull number c, from 0, sees every worker's pushes before number c - bound and none from
    number c + bound on. With bound 0 these are exactly the pushes before c: with plain SGD, synchronous training.
    staleness: for each update, the number of other updates since its worker's pull was answered.
    """

    def __init__(self, parameters: Tensor, update: Update, num_workers: int, bound: int | None = None):
        self.parameters, self.bound, self.staleness, self._update = parameters, bound, list[int](), update
        self._pulls, self._pushes = dict.fromkeys(range(num_workers), 0), dict.fromkeys(range(num_workers), 0)
        self._pulled_at: dict[int, int] = {}  # how many updates there were at the worker's last pull
        self._waiting: dict[int, Pull | Push] = {}  # in the order of arrival

    def handle(self, worker: int, request: Pull | Push | None) -> list[tuple[int, Tensor | None]]:
        """Accept a worker's request (None: the worker leaves); return all answers now due, as (worker, answer).

        A request that would exceed `bound` is answered by a later call, when other workers have caught up or left.
        """
        self._waiting[worker] = request
        if request is None:
            del self._waiting[worker], self._pulls[worker], self._pushes[worker]
        answers = []
        while due := [each for each in self._waiting if self._is_due(each, self._waiting[each])]:
            answers.append((due[0], self._answer(due[0], self._waiting.pop(due[0]))))
        return answers

    def _is_due(self, worker: int, request: Pull | Push) -> bool:
        ahead = self._pushes[worker] - min(self._pushes.values())
        if isinstance(request, Push):  # a worker that has yet to pull must not see too far into its future
            ahead = self._pushes[worker] + 1 - min(self._pulls.values())
        return self.bound is None or ahead <= self.bound

    def _answer(self, worker: int, request: Pull | Push) -> Tensor | None:
        if isinstance(request, Pull):
            self._pulls[worker] += 1
            self._pulled_at[worker] = len(self.staleness)
            return self.parameters.clone()
        self._pushes[worker] += 1
        self._update(self.parameters, request.gradient)
        self.staleness.append(len(self.staleness) - self._pulled_at[worker])
        return None
