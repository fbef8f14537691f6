"""Replicas that differ, against synchronous training, torch and numpy; both servers against each other."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from minidist.comm import GroupSpec, bind
from minidist.config import ConsistencyConfig
from minidist.consistency import server as fast
from minidist.mesh import Mesh
from minidist.simple.consistency import (
    OuterStep,
    Pull,
    Push,
    ReplicaMerger,
    Server,
    asynchronous_worker,
    central_step,
    local_round,
    merge_replicas,
)
from minidist.tools.consistency.clock import Durations, run_on_virtual_clock

SIZE, LR, STEPS = 7, 0.05, 6
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def group_of(world):
    return bind(world, Mesh(dp=world.size), [GroupSpec("replicas", ("dp",))])["replicas"]


def gradient(parameters, replica, step):
    """Of a cubic loss that differs between replicas and steps."""
    generator = torch.Generator().manual_seed(100 * replica + step)
    target = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (parameters - target) + 0.1 * parameters.double() ** 2 * torch.sign(parameters)


def weight_of(replica):
    return 1.0 + replica


def start():
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def synchronous(replicas, steps=STEPS, momentum=0.0):
    """theta <- theta - lr sum_i w_i grad_i in one process, by torch's SGD."""
    parameter = nn.Parameter(start())
    optimizer = torch.optim.SGD([parameter], LR, momentum=momentum)
    for step in range(steps):
        parameter.grad = sum(weight_of(i) * gradient(parameter.detach(), i, step) for i in range(replicas))
        optimizer.step()
    return parameter.detach()


def sgd(parameters, total):
    parameters -= LR * total


# -- a central server -------------------------------------------------------------------------------------------------


def train_central(world, root):
    group, parameters = group_of(world), start()
    optimizer = torch.optim.SGD([parameter := nn.Parameter(parameters)], LR, momentum=0.9)

    def update(values, total):
        assert world.rank == root and values is parameters
        parameter.grad = total
        optimizer.step()

    for step in range(STEPS):
        central_step(parameters, weight_of(world.rank) * gradient(parameters, world.rank, step), update, group, root)
    return parameters


@pytest.mark.parametrize("size, root", [(1, 0), (2, 1), (3, 0), (4, 2)])
def test_a_central_server_is_synchronous_training(ranks, size, root):
    for parameters in ranks(train_central, size, root):
        torch.testing.assert_close(parameters, synchronous(size, momentum=0.9), **EXACT)


# -- asynchronous -----------------------------------------------------------------------------------------------------


def train_asynchronous(workers, bound, durations, steps=STEPS):
    parameters = start()
    server = Server(parameters, sgd, workers, bound)
    seen = []

    def compute_of(worker):
        def compute(values, step):
            seen.append((worker, step, values))
            return weight_of(worker) * gradient(values, worker, step)

        return compute

    made = [asynchronous_worker(compute_of(worker), steps) for worker in range(workers)]
    return parameters, server, run_on_virtual_clock(server, made, durations), seen


UNEVEN = Durations(compute_s=[1.0, 0.1, 0.5, 2.0], transfer_s=[0.2, 5.0, 0.01, 0.3], spread=0.9, seed=3)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("shared_link", [False, True])
def test_staleness_bound_0_is_synchronous_training(workers, shared_link):
    durations = Durations(UNEVEN.compute_s, UNEVEN.transfer_s, 0.9, 3, shared_link)
    parameters, server, _, seen = train_asynchronous(workers, 0, durations)
    torch.testing.assert_close(parameters, synchronous(workers), **EXACT)
    for _, step, values in seen:
        torch.testing.assert_close(values, synchronous(workers, step), **EXACT)
    assert max(server.staleness) == workers - 1  # the others' pushes of the same clock


@pytest.mark.parametrize("bound", [0, 1, 2, 5, None])
def test_one_worker_without_waiting_is_one_process(bound):
    parameters, server, timeline, _ = train_asynchronous(1, bound, UNEVEN)
    torch.testing.assert_close(parameters, synchronous(1), **EXACT)
    assert server.staleness == [0] * STEPS and timeline.waited_s == [0.0]


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_every_pull_sees_the_updates_that_the_bound_promises(bound):
    """Each worker pushes its own digit, so the parameters count the pushes of every worker."""
    steps, workers = 12, 4
    parameters = torch.zeros(workers, dtype=torch.float64)
    server, ahead = Server(parameters, torch.Tensor.add_, workers, bound), []

    def compute_of(worker):
        def compute(values, step):
            assert values.min() >= step - bound and values.max() <= step + bound
            ahead.append(float(values.max()) - step)
            return torch.eye(workers, dtype=torch.float64)[worker]

        return compute

    made = [asynchronous_worker(compute_of(worker), steps) for worker in range(workers)]
    run_on_virtual_clock(server, made, UNEVEN)
    assert parameters.tolist() == [steps] * workers
    assert max(ahead) == bound, "the bound was never reached"


def test_a_run_on_the_virtual_clock_is_the_same_twice_and_differs_with_the_seed():
    runs = [train_asynchronous(4, None, UNEVEN) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1].staleness == runs[1][1].staleness and runs[0][2] == runs[1][2]
    other = train_asynchronous(4, None, Durations(UNEVEN.compute_s, UNEVEN.transfer_s, 0.9, seed=4))
    assert other[2] != runs[0][2]
    assert not torch.allclose(runs[0][0], synchronous(4), rtol=1e-3)


def test_the_virtual_clock_adds_up_durations():
    """Without a spread: worker 1 takes 2 + 1 + 2 s per update, worker 0 1 s; nobody waits without a bound."""
    durations = Durations(compute_s=[1.0, 1.0], transfer_s=[0.0, 2.0])
    _, server, timeline, _ = train_asynchronous(2, None, durations, steps=3)
    assert timeline.updates == [(1.0, 0), (2.0, 0), (3.0, 0), (5.0, 1), (10.0, 1), (15.0, 1)]
    assert server.staleness == [0, 0, 0, 3, 0, 0] and timeline.waited_s == [0.0, 0.0] and timeline.end_s == 15.0
    _, _, timeline, _ = train_asynchronous(2, 0, durations, steps=3)
    assert timeline.updates == [(1.0, 0), (5.0, 1), (6.0, 0), (10.0, 1), (11.0, 0), (15.0, 1)]
    assert timeline.waited_s == [8.0, 0.0]


def test_a_shared_link_carries_one_message_at_a_time():
    """Four workers with equal durations: their 4 + 4 messages of 1 s follow each other, and computing overlaps."""
    alone = Durations([1.0] * 4, [1.0] * 4)
    assert train_asynchronous(4, None, alone, steps=1)[2].updates == [(3.0, i) for i in range(4)]
    shared = Durations([1.0] * 4, [1.0] * 4, shared_link=True)
    assert [time for time, _ in train_asynchronous(4, None, shared, steps=1)[2].updates] == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("bound", [0, 1, None])
def test_the_others_go_on_when_a_worker_leaves(bound):
    durations = Durations([1.0, 1.0, 4.0], [0.0] * 3, leave_s={2: 9.0})
    _, server, timeline, _ = train_asynchronous(3, bound, durations, steps=8)
    count = [sum(worker == each for _, worker in timeline.updates) for each in range(3)]
    assert count == [8, 8, 2] and len(server.staleness) == 18


def test_a_server_answers_requests_in_the_order_of_arrival():
    server = Server(torch.zeros(1), torch.Tensor.add_, 2, bound=0)
    assert [worker for worker, _ in server.handle(0, Pull())] == [0]
    assert server.handle(0, Push(torch.ones(1))) == []  # worker 1 has not pulled
    answers = server.handle(1, Pull())
    assert [worker for worker, _ in answers] == [1, 0] and answers[0][1].item() == 0.0 and answers[1][1] is None
    assert server.handle(0, Pull()) == []
    assert [(worker, answer) for worker, answer in server.handle(1, None)][0][0] == 0


def serve_in_random_order(server, pull, push, seed):
    """Let three workers make a hundred requests in a random order; return all answers and the stalenesses."""
    draw, free, wants, log = random.Random(seed), [0, 1, 2], [pull(), pull(), pull()], []
    for _ in range(100):
        if not free:  # every worker waits
            break
        worker = free.pop(draw.randrange(len(free)))
        for other, answer in server.handle(worker, wants[worker]):
            free.append(other)
            wants[other] = pull() if answer is None else push(torch.eye(3)[other])
            log.append((other, answer if answer is None else answer.tolist()))
    return log, server.staleness


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_the_fast_trainers_server_gives_the_same_answers(bound):
    for seed in range(5):
        simple = serve_in_random_order(Server(torch.zeros(3), torch.Tensor.add_, 3, bound), Pull, Push, seed)
        other = fast.Server(torch.zeros(3), torch.Tensor.add_, 3, bound)
        assert serve_in_random_order(other, fast.Pull, fast.Push, seed) == simple
        assert len(simple[0]) > 90


# -- local steps and DiLoCo -------------------------------------------------------------------------------------------


def train_local(world, local_steps, outer=None):
    group, parameters = group_of(world), start()
    outer_step = None if outer is None else OuterStep(parameters, *outer)

    def local_step(values, step):
        values -= LR * gradient(values, world.rank, step)

    for first in range(0, STEPS, local_steps):
        steps = range(first, first + local_steps)
        if outer_step is None:
            local_round(parameters, local_step, steps, weight_of(world.rank), group)
        else:
            for step in steps:
                local_step(parameters, step)
            outer_step.step(parameters, weight_of(world.rank), group)
    return parameters


def expected_local(size, local_steps, lr=1.0, momentum=0.0):
    """In one process with numpy's average and torch's Nesterov SGD."""
    outer = nn.Parameter(start())
    optimizer = torch.optim.SGD([outer], lr, momentum=momentum, nesterov=momentum > 0)
    for first in range(0, STEPS, local_steps):
        replicas = []
        for replica in range(size):
            values = outer.detach().clone()
            for step in range(first, first + local_steps):
                values -= LR * gradient(values, replica, step)
            replicas.append(values.numpy())
        average = np.average(replicas, axis=0, weights=[weight_of(i) for i in range(size)])
        outer.grad = outer.detach() - torch.from_numpy(average)
        optimizer.step()
    return outer.detach()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_local_steps_and_weighted_averages(ranks, size):
    for parameters in ranks(train_local, size, 3):
        torch.testing.assert_close(parameters, expected_local(size, 3), **EXACT)


def test_local_sgd_with_one_step_is_synchronous_training(ranks):
    """The weighted mean of the gradients instead of their weighted sum: the rate is smaller by the sum of weights."""
    parameter = nn.Parameter(start())
    for step in range(STEPS):
        total = sum(weight_of(i) * gradient(parameter.detach(), i, step) for i in range(3))
        parameter.data -= LR * total / sum(map(weight_of, range(3)))
    for parameters in ranks(train_local, 3, 1):
        torch.testing.assert_close(parameters, parameter.detach(), **EXACT)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_outer_step_is_nesterov_on_the_averaged_difference(ranks, size):
    for parameters in ranks(train_local, size, 2, (0.7, 0.9)):
        torch.testing.assert_close(parameters, expected_local(size, 2, 0.7, 0.9), **EXACT)


def test_diloco_with_outer_rate_1_and_no_momentum_is_local_averaging(ranks):
    averaged, outer = ranks(train_local, 3, 2), ranks(train_local, 3, 2, (1.0, 0.0))
    torch.testing.assert_close(outer[0], averaged[0], **EXACT)


def merge_with(world, weights, values):
    parameters = torch.tensor(values[world.rank], dtype=torch.float64)
    try:
        merge_replicas(parameters, weights[world.rank], group_of(world))
    except ValueError as error:
        return str(error)
    return parameters.tolist()


def test_a_replica_of_weight_0_does_not_count(ranks):
    values = [[1.0, 2.0], [float("nan"), float("inf")], [4.0, -4.0]]
    assert ranks(merge_with, 3, [1.0, 0.0, 3.0], values) == [[3.25, -2.5]] * 3


def test_weights_that_sum_to_0_are_refused_on_all_ranks(ranks):
    messages = ranks(merge_with, 2, [0.0, 0.0], [[1.0], [2.0]])
    assert messages == ["the weights of all replicas sum to 0: give one of them a weight above 0"] * 2


MERGED = {"two": (2, 3), "one": (4,)}  # names and shapes of a replica's masters


def run_merger(world, mode, h, tokens):
    """Change the masters and call `after_step` for each step; return what it returned, and the masters, each time.

    tokens: of each step, each replica's number of tokens. A replica without tokens does not change.
    """
    masters = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in MERGED.items()}
    merger = ReplicaMerger(ConsistencyConfig(mode=mode, h=h, outer_lr=0.5), masters, group_of(world), len(tokens))
    seen = []
    for step, counts in enumerate(tokens):
        for master in masters.values():
            master.data += (world.rank + 1) * (step + 1) * bool(counts[world.rank])
        is_merged = merger.after_step(step, counts[world.rank])
        seen.append((is_merged, merger.num_different_models, merger.num_tokens.item(), masters["one"][0].item()))
    return seen


def test_a_merger_merges_every_h_steps_and_after_the_last_by_the_tokens_since_the_last_merge(ranks):
    tokens = [(3.0, 1.0), (5.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 3.0)]
    first, second = ranks(run_merger, 2, "local", 2, tokens)
    merged = (8 * 3 + 1 * 2) / 9
    after = merged + (1 * 5 + 3 * 10) / 4
    assert first == [
        (False, 2, 3.0, 1.0),
        (True, 1, 0.0, pytest.approx(merged)),
        (False, 2, 0.0, pytest.approx(merged)),
        (False, 1, 0.0, pytest.approx(merged)),  # nobody has trained
        (True, 1, 0.0, pytest.approx(after)),
    ]
    assert [row[:3] for row in second] == [(False, 2, 1.0), *[row[:3] for row in first[1:]]]
    assert [row[3] for row in second[1:]] == [row[3] for row in first[1:]]
