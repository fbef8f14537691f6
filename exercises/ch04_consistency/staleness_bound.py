"""A server with a staleness bound.

The server answers pulls and pushes of asynchronous workers. With a bound it delays some answers, so that no worker is
more than `bound` clocks ahead of the slowest one. Write the methods that receive a request (handle), decide whether it
is due (_is_due), and answer it (_answer).

A worker's clock is the number of its pushes. Pull number c of a worker, from 0, must see all pushes of every worker
before number c - bound, and no push from number c + bound on. So a pull waits until slow workers have pushed, and a
push waits until slow workers have pulled. Requests that are due are answered at once, in the order of their arrival;
an answer can make other requests due. `staleness` has one entry per update: the number of other updates since the pull
of this update's worker was answered.

Example: 2 workers, bound 0. Worker 0 pulls: handle returns [(0, parameters)]. Worker 0 pushes: [], because worker 1
has not pulled yet and must not see this push. Worker 1 pulls: [(1, parameters), (0, None)]. Worker 0 pulls: []; its
pull is answered when worker 1 pushes.

Checked: the answers to single requests, and to many in a random order; what every pull sees, in runs on the virtual
clock with bounds 0 to 3 and without one; staleness; that an answered copy does not change; and workers that leave.

You may call:
    self._pulls[worker], self._pushes[worker]   the number of each worker's answered pulls and pushes
    self._waiting[worker]   the request that waits; a dict keeps the order of arrival
    self._pulled_at[worker]   how many updates there were at the worker's last pull
    self._update(self.parameters, gradient), self.parameters.clone(), self.staleness.append(count)

Check it with: python -m exercises check staleness_bound

Stub 776ca5cc.
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
        raise NotImplementedError("note the request, and answer all that are due")

    def _is_due(self, worker: int, request: Pull | Push) -> bool:
        raise NotImplementedError("return whether the request may be answered now")

    def _answer(self, worker: int, request: Pull | Push) -> Tensor | None:
        raise NotImplementedError("answer a pull with a copy of the parameters, a push with an update")
