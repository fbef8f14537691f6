"""Replicas that differ: theta_i <- theta_i - lr * grad L_i(theta_i), merged from time to time, or never.

    central_step                   one server sums all gradients, updates, and sends the parameters (Li et al. 2014)
    Server, asynchronous_worker    no barrier: pull, compute, push; with a staleness bound, SSP (Ho et al. 2013)
    merge_replicas                 local SGD: steps without communication, then a weighted average (Stich 2018)
    OuterStep                      DiLoCo: the averaged change is the gradient of an outer step (arXiv 2311.08105)
    ReplicaMerger                  local SGD or DiLoCo between the replicas of a trainer, each of any layout

All but the last work on one flat tensor of parameters.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce, recv, send
from minidist.config import ConsistencyConfig

Update = Callable[[Tensor, Tensor], None]  # (parameters, gradient): changes the parameters in place
LocalStep = Callable[[Tensor, int], None]  # (parameters, step): changes the parameters in place
ComputeGradient = Callable[[Tensor, int], Tensor]  # (parameters, step) -> w_i * grad L_i(parameters)


def central_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group, server: int) -> None:
    """Collective: sum all gradients on the server, update the parameters there, and send them to all ranks.

    gradient: this rank's, already times its weight, (n,) as `parameters`. server: a group rank, the only one with
    optimizer states; update(parameters, summed gradient) is called there. `parameters` is overwritten on all ranks.
    """
    if group.rank != server:
        send(gradient, server, group)
        recv(parameters, server, group)
        return
    workers = [rank for rank in range(group.size) if rank != server]
    total, received = gradient.clone(), torch.empty_like(gradient)
    for rank in workers:
        recv(received, rank, group)
        total += received
    update(parameters, total)
    for rank in workers:
        send(parameters, rank, group)


class Pull:
    """A worker's request for the parameters; the server's answer is a copy of them."""


@dataclass(frozen=True, eq=False)
class Push:
    """A worker's request to apply its gradient; the server's answer is None."""

    gradient: Tensor


Worker = Generator[Pull | Push, Tensor | None, None]  # yields requests, and is sent their answers


def asynchronous_worker(compute_gradient: ComputeGradient, num_steps: int) -> Worker:
    """Yield, `num_steps` times, a Pull and then the Push of a gradient at the pulled parameters."""
    for step in range(num_steps):
        parameters = yield Pull()
        yield Push(compute_gradient(parameters, step))


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


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    total_weight = torch.tensor([weight], dtype=torch.float64, device=group.world.control_device)
    all_reduce(total_weight, group)
    if total_weight.item() == 0:
        raise ValueError("the weights of all replicas sum to 0: give one of them a weight above 0")
    # Divided before the sum: a sum of w_i * theta_i would overflow in float16 if w_i counts tokens.
    average = parameters * (weight / total_weight.item()) if weight else torch.zeros_like(parameters)
    all_reduce(average, group)
    parameters.copy_(average)


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then merge by `weight`."""
    for step in steps:
        local_step(parameters, step)
    merge_replicas(parameters, weight, group)


class OuterStep:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged change of H inner steps.

    parameters: the first ones, equal on all ranks. lr, momentum: of the outer step; 1 and 0 give local SGD.
    """

    def __init__(self, parameters: Tensor, lr: float = 0.7, momentum: float = 0.9):
        self.start, self.velocity = parameters.clone(), torch.zeros_like(parameters)
        self.lr, self.momentum = lr, momentum

    def step(self, parameters: Tensor, weight: float, group: Group) -> None:
        """Collective: overwrite the `parameters` after the inner steps with the result of the outer step."""
        outer_gradient = self.start - parameters
        merge_replicas(outer_gradient, weight, group)
        self.velocity.mul_(self.momentum).add_(outer_gradient)
        self.start -= self.lr * (outer_gradient + self.momentum * self.velocity)
        parameters.copy_(self.start)


class ReplicaMerger:
    """Merges the masters of replicas that train separately: every h steps, and after the last step.

    Each parameter is merged by itself: ranks that have the same parameter, such as the two stages with a tied
    embedding, then add the same numbers in the same order, and stay equal bit by bit.

    config: mode is "local" or "diloco". masters: this rank's, by name. group: the ranks at the same place in each
    replica, which have the same elements. num_steps: of the run.

    num_tokens: (1,), trained on since the last merge: the weight of the replica. A checkpoint overwrites it in place.
    num_different_models: the number of replicas, or 1 at the start and after a step in which a merge was due.
    """

    def __init__(self, config: ConsistencyConfig, masters: Mapping[str, Tensor], group: Group, num_steps: int):
        self.h, self.num_steps = config.h, num_steps
        self.masters, self.group = dict(masters), group
        self.num_tokens = torch.zeros(1, dtype=torch.float64)
        self.num_different_models = 1
        self.outer: dict[str, OuterStep] = {}
        if config.mode == "diloco":
            for name, master in masters.items():
                self.outer[name] = OuterStep(master.detach(), config.outer_lr, config.outer_momentum)

    @torch.no_grad()
    def after_step(self, step: int, num_tokens: float) -> bool:
        """Collective over the replicas if a merge is due: merge the masters; return whether that has been done.

        step: the number of the step, from 0. num_tokens: that this replica has trained on in the step. If no replica
        has any since the last merge, nothing changes.
        """
        self.num_tokens += num_tokens
        is_due = (step + 1) % self.h == 0 or step + 1 == self.num_steps
        self.num_different_models = 1 if is_due else self.group.size
        if not is_due:
            return False
        total = self.num_tokens.to(self.group.world.control_device, copy=True)
        all_reduce(total, self.group)
        if total.item() == 0:
            return False
        for name, master in self.masters.items():
            if name in self.outer:
                self.outer[name].step(master, self.num_tokens.item(), self.group)
            else:
                merge_replicas(master, self.num_tokens.item(), self.group)
        self.num_tokens.zero_()
        return True

    def outer_states(self) -> dict[str, dict[str, Tensor]]:
        """Return DiLoCo's states, which a checkpoint needs: {"outer.start": {name: tensor}, "outer.velocity": ...}."""
        return {
            "outer.start": {name: outer.start for name, outer in self.outer.items()},
            "outer.velocity": {name: outer.velocity for name, outer in self.outer.items()},
        }
