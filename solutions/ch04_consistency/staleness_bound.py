"""A server with a staleness bound: the solution, as it stands in minidist.simple.consistency.

Without a bound a slow worker may push a gradient of parameters that are arbitrarily old. With a bound s its gradient
misses at most the last s clocks of the others, and the fast workers wait only when they are s clocks ahead (SSP, Ho
et al. 2013). Bound 0 is synchronous training: each pull sees exactly the pushes of the clocks before.

Most implementations let only pulls wait. Then a slow worker's pull may see pushes of its own future, which does no
harm in practice, but bound 0 would not be synchronous training, and two runs could not be compared. An answer changes
the counts, so others may become due: a pull can release a push, and this push a pull. A worker that has left must not
be the slowest one for ever.

Usual wrong answers:
* adds the gradient to the parameters, and does not call update
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
* counts until a push arrives, and not until it is answered: updates while it waits are missing
* counts the update itself among those in between
* keeps a copy of the parameters: the tensor of the caller, the model that it evaluates, never changes
* answers nobody
"""

from torch import Tensor

from minidist.simple.consistency import Pull, Push, Update


class Server:
    """A parameter server for workers of different speeds. Its caller carries requests and answers.

    update: applies one gradient to the parameters. bound: how many pushes a worker may be ahead of the slowest one;
    None: any number. Pull number c of a worker, from 0, sees all pushes before number c - bound of every worker, and
    none from number c + bound on. With bound 0 these are exactly the pushes before c: synchronous training, for SGD.

    staleness: for each update, the number of other updates since its worker's pull was answered.
    """

    def __init__(self, parameters: Tensor, update: Update, num_workers: int, bound: int | None = None):
        self.parameters, self.update, self.bound = parameters, update, bound
        self.num_pulls = dict.fromkeys(range(num_workers), 0)
        self.num_pushes = dict.fromkeys(range(num_workers), 0)
        self.pulled_after: dict[int, int] = {}  # number of updates at each worker's last pull
        self.waiting: dict[int, Pull | Push] = {}  # in the order of arrival
        self.staleness: list[int] = []

    def handle(self, worker: int, request: Pull | Push | None) -> list[tuple[int, Tensor | None]]:
        """Accept a worker's request, None if it leaves; return all answers that are due now, as (worker, answer).

        A request that would exceed the bound is answered by a later call, when other workers have caught up or left.
        """
        if request is None:
            del self.num_pulls[worker], self.num_pushes[worker]
        else:
            self.waiting[worker] = request
        answers = []
        while due := [each for each, waiting in self.waiting.items() if self.is_due(each, waiting)]:
            answers.append((due[0], self.answer(due[0], self.waiting.pop(due[0]))))
        return answers

    def is_due(self, worker: int, request: Pull | Push) -> bool:
        """Whether the staleness bound allows the server to answer this request now. Changes nothing."""
        if self.bound is None:
            return True
        if isinstance(request, Push):  # a worker that has yet to pull must not see too far into its future
            return self.num_pushes[worker] + 1 - min(self.num_pulls.values()) <= self.bound
        return self.num_pushes[worker] - min(self.num_pushes.values()) <= self.bound

    def answer(self, worker: int, request: Pull | Push) -> Tensor | None:
        """Carry out a request and return its answer."""
        if isinstance(request, Pull):
            self.num_pulls[worker] += 1
            self.pulled_after[worker] = len(self.staleness)
            return self.parameters.clone()
        self.num_pushes[worker] += 1
        self.update(self.parameters, request.gradient)
        self.staleness.append(len(self.staleness) - self.pulled_after[worker])
        return None
