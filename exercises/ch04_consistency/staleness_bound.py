"""A server with a staleness bound.

Write the parameter server of asynchronous workers. It answers pulls with a copy of the parameters and pushes with an
update; with a bound it delays some answers, so that no worker is more than `bound` clocks ahead of the slowest one.

parameters: the caller's flat tensor, which update(parameters, gradient) changes in place. num_workers: the workers are
numbered from 0. bound: an integer, 0 or more, or None for no bound. handle(worker, request) gets a Pull(), a
Push(gradient), or None if the worker leaves, and returns a list of (worker, answer) of all requests that are due now:
its own, and those of earlier calls that have waited. The answer is a copy of the parameters for a pull, None for a
push; a worker that leaves gets none. A request that is not due waits in the server, and its worker makes no other one
and does not leave. Each worker begins with a pull, and then pushes and pulls alternately. Only handle calls is_due and
answer: you may write other methods in their place.

A worker's clock is the number of its pushes. Pull number c of a worker, from 0, must see all pushes of every worker
before number c - bound, and no push from number c + bound on. So a pull waits until slow workers have pushed, and a
push waits until slow workers have pulled. An answer can make other requests due, also earlier ones: after each answer,
the next one goes to the earliest request that is due now. `staleness` is a list with one entry per update: the number
of other updates since the pull of this update's worker was answered.

Example: 2 workers, bound 0. Worker 0 pulls: handle returns [(0, parameters)]. Worker 0 pushes: [], because worker 1
has not pulled yet and must not see this push. Worker 1 pulls: [(1, parameters), (0, None)]. Worker 0 pulls: []; its
pull is answered when worker 1 pushes.

Checked: the answers to single requests, and to many in a random order; what every pull sees, in runs on the virtual
clock with bounds 0 to 3 and without one; staleness; that an answered copy does not change; that a larger bound waits
less; and workers that leave: nobody waits for them any more, and those that have waited for them are answered at once.

You may call:
    isinstance(request, Pull), request.gradient   of a Push
    dict.fromkeys(range(num_workers), 0)   a count for each worker; a dict keeps the order in which keys were added
    update(parameters, gradient)   as given to the constructor
    Tensor.clone(), list.append(value), dict.pop(key), min(values)

Check it with: python -m exercises check staleness_bound

Stub 5ed5efb8.
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
        raise NotImplementedError("note the arguments; begin counts, waiting requests and stalenesses")

    def handle(self, worker: int, request: Pull | Push | None) -> list[tuple[int, Tensor | None]]:
        """Accept a worker's request, None if it leaves; return all answers that are due now, as (worker, answer).

        A request that would exceed the bound is answered by a later call, when other workers have caught up or left.
        """
        raise NotImplementedError("note the request, and answer all that are due")

    def is_due(self, worker: int, request: Pull | Push) -> bool:
        """Whether the staleness bound allows the server to answer this request now. Changes nothing."""
        raise NotImplementedError("return whether the request may be answered now")

    def answer(self, worker: int, request: Pull | Push) -> Tensor | None:
        """Carry out a request and return its answer."""
        raise NotImplementedError("answer a pull with a copy of the parameters, a push with an update")
