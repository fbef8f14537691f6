"""Replicas that differ, in one file: all parameters in one flat tensor, updates by plain functions, no rank fails.

theta <- theta - lr * sum_i w_i * grad L(theta_i): synchronous training has all theta_i equal; here they need not be.

central_step                  one server sums the gradients, updates, and sends the parameters (Li et al. 2014)
asynchronous_worker, Server   no barrier: pull, compute, push; at most `bound` clocks apart (SSP, Ho et al. 2013)
merge_replicas, local_round   steps without communication, then a weighted average (local SGD, Stich 2018)
OuterStep                     the averaged difference as the gradient of an outer step (DiLoCo, arXiv 2311.08105)
The option `fault.digest_every` finds out which replicas differ, and in which tensors.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce, recv, send

Update = Callable[[Tensor, Tensor], None]  # (parameters, gradient): changes the parameters in place
LocalStep = Callable[[Tensor, int], None]  # (parameters, step): changes the parameters in place
ComputeGradient = Callable[[Tensor, int], Tensor]  # (parameters, step) -> w_i * grad L(parameters)


def central_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group, server: int) -> None:
    """Collective: sum all gradients on the server, update the parameters there, and send them to all ranks.

    gradient: this rank's, times its weight w_i. update: called on the server only, which alone needs optimizer states.
    `parameters` is overwritten on all ranks.
    """
    if group.rank != server:
        send(gradient, server, group)
        recv(parameters, server, group)
        return
    others = [rank for rank in range(group.size) if rank != server]
    total, arriving = gradient.clone(), torch.empty_like(gradient)
    for rank in others:
        recv(arriving, rank, group)
        total += arriving
    update(parameters, total)
    for rank in others:
        send(parameters, rank, group)


class Pull:
    """A worker's request to a `Server` for the parameters; the answer is a copy of them."""


@dataclass(frozen=True, eq=False)
class Push:
    """A worker's request to a `Server` to apply its gradient; the answer is None."""

    gradient: Tensor


Worker = Generator[Pull | Push, Tensor | None, None]  # yields requests, is sent their answers


def asynchronous_worker(compute_gradient: ComputeGradient, num_steps: int) -> Worker:
    """Yield, `num_steps` times, a Pull and then a Push of a gradient; the caller sends in the `Server`'s answers."""
    for step in range(num_steps):
        parameters = yield Pull()
        yield Push(compute_gradient(parameters, step))


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


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    weights = torch.tensor([weight], dtype=torch.float64, device=parameters.device)
    all_reduce(weights, group)
    if weights.item() == 0:
        raise ValueError("the weights of all replicas sum to 0: give one of them a weight above 0")
    # weight * parameters, summed and then divided, would overflow in float16 if the weights are token counts.
    mean = parameters * (weight / weights.item()) if weight else torch.zeros_like(parameters)
    all_reduce(mean, group)
    parameters.copy_(mean)


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then `merge_replicas` by `weight`."""
    for step in steps:
        local_step(parameters, step)
    merge_replicas(parameters, weight, group)


class OuterStep:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged difference of H inner steps.

    parameters: the initial ones, equal on all ranks. lr, momentum: of the outer step; 1 and 0 give local SGD.
    """

    def __init__(self, parameters: Tensor, lr: float = 0.7, momentum: float = 0.9):
        self.start, self.velocity = parameters.clone(), torch.zeros_like(parameters)
        self.lr, self.momentum = lr, momentum

    def step(self, parameters: Tensor, weight: float, group: Group) -> None:
        """Collective: overwrite `parameters` after inner steps with the outer step's. weight: see `merge_replicas`."""
        outer_gradient = self.start - parameters
        merge_replicas(outer_gradient, weight, group)
        self.velocity.mul_(self.momentum).add_(outer_gradient)
        self.start -= self.lr * (outer_gradient + self.momentum * self.velocity)
        parameters.copy_(self.start)
