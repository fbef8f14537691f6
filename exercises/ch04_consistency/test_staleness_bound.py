"""Tests of staleness_bound: workers that push a 1 into their own element, so that the parameters count all pushes."""

import random

import torch

from exercises.testing import Wrong, expect, show, test
from minidist.simple.consistency import Pull, Push, asynchronous_worker
from minidist.tools.consistency.clock import Durations, run_on_virtual_clock

UNEVEN = Durations(compute_s=[1.0, 0.1, 0.5, 2.0], transfer_s=[0.2, 5.0, 0.01, 0.3], spread=0.9, seed=3)


def add(parameters, gradient):
    parameters += gradient


def subtract_half(parameters, gradient):
    parameters -= gradient / 2


def own_element(worker, workers):
    return torch.eye(workers, dtype=torch.float64)[worker]


def zeros(workers):
    return torch.zeros(workers, dtype=torch.float64)


def make_server(answer, workers, bound=None):
    return answer.Server(zeros(workers), add, workers, bound)


def handle(server, worker, request):
    answers = server.handle(worker, request)
    if not isinstance(answers, list):
        raise Wrong("type", "handle must return a list of (worker, answer)", "a list", show(answers))
    return answers


def names(answers):
    """[(worker, "parameters" or None)] of what `handle` returned."""
    return [(worker, None if answer is None else "parameters") for worker, answer in answers]


def run(answer, bound, durations=UNEVEN, steps=12, workers=4):
    """All workers to their end; returns the parameters, the timeline, and (worker, step, pulled) of every gradient."""
    parameters, seen = zeros(workers), []
    server = answer.Server(parameters, add, workers, bound)

    def compute_of(worker):
        def compute(pulled, step):
            seen.append((worker, step, pulled.tolist()))
            return own_element(worker, workers)

        return compute

    made = [asynchronous_worker(compute_of(worker), steps) for worker in range(workers)]
    return parameters, run_on_virtual_clock(server, made, durations), seen


@test(points=3)
def pull_and_push_without_a_bound(answer):
    """Without a bound every request is answered at once: a pull by a copy of the parameters, a push by None."""
    given = zeros(2)
    server = answer.Server(given, add, 2)
    first = handle(server, 0, Pull())
    expect("answers to a pull of worker 0", names(first), [(0, "parameters")])
    for number in range(1, 4):
        expect("answers to a push of worker 0", names(handle(server, 0, Push(own_element(0, 2)))), [(0, None)])
        [(_, parameters)] = handle(server, 0, Pull())
        expect("parameters of the next pull", parameters, [number, 0.0], case=f"worker 0 has pushed {number} times")
    expect("the parameters of the first pull, afterwards", first[0][1], [0.0, 0.0])
    expect("the tensor given to the server, afterwards", given, [3.0, 0.0])
    for bound in (0, None):
        given = zeros(1)
        server = answer.Server(given, subtract_half, 1, bound)
        for number in range(3):
            case = f"one worker, bound {bound}, update(parameters, gradient) subtracts half of the gradient"
            [(_, parameters)] = handle(server, 0, Pull())
            expect(f"parameters of pull number {number}", parameters, [-0.5 * number], case=case)
            expect("answers to the push", names(handle(server, 0, Push(own_element(0, 1)))), [(0, None)], case=case)
        expect("the tensor given to the server, afterwards", given, [-1.5], case=case)


@test(points=3)
def staleness_counts_the_updates_in_between(answer):
    """staleness: for each update, the number of other updates since its worker's pull was answered."""
    server = make_server(answer, 3)
    for worker in (0, 1, 2):
        handle(server, worker, Pull())
    for worker in (1, 0):
        handle(server, worker, Push(own_element(worker, 3)))
    handle(server, 1, Pull())
    for worker in (1, 2):
        handle(server, worker, Push(own_element(worker, 3)))
    case = "workers 0, 1 and 2 pull, 1 and 0 push, 1 pulls, 1 and 2 push"
    expect("server.staleness", server.staleness, [0, 1, 0, 3], case=case)
    server = make_server(answer, 2, bound=0)
    for _ in range(2):
        for worker, request in ((0, Pull), (0, Push), (1, Pull), (1, Push)):
            handle(server, worker, request() if request is Pull else Push(own_element(worker, 2)))
    case = "bound 0, twice: worker 0 pulls and pushes, worker 1 pulls and pushes"
    expect("server.staleness", server.staleness, [0, 1, 0, 1], case=case)
    server = make_server(answer, 2, bound=0)
    for worker, request in ((0, Pull), (1, Pull), (0, Push), (0, Pull), (1, Push), (1, Pull), (0, Push), (1, Push)):
        handle(server, worker, request() if request is Pull else Push(own_element(worker, 2)))
    case = "bound 0: worker 0 pulls again before worker 1 pushes, and waits for this push"
    expect("server.staleness", server.staleness, [0, 1, 0, 1], case=case)


@test(points=3)
def bound_0_waits_for_all(answer):
    """With bound 0 a pull waits for the pushes of all workers, and a push for the pulls of all workers."""
    server = make_server(answer, 2, bound=0)
    steps = [
        (0, Pull(), [(0, "parameters")]),
        (0, Push(own_element(0, 2)), []),
        (1, Pull(), [(1, "parameters"), (0, None)]),
        (0, Pull(), []),
        (1, Push(own_element(1, 2)), [(1, None), (0, "parameters")]),
    ]
    case = "bound 0:"
    for worker, request, expected in steps:
        case += f" {type(request).__name__.lower()} of {worker},"
        expect("due answers after the last request", names(handle(server, worker, request)), expected, case=case[:-1])


def random_order(server, seed=5, workers=3, leaving=0.0):
    """Sixty requests in a random order; yields (number, worker, request, due answers).

    leaving: the probability that a worker leaves in place of its next request.
    """
    draw, free, wants = random.Random(seed), set(range(workers)), [Pull() for _ in range(workers)]
    for number in range(60):
        if not free:
            return
        worker = draw.choice(sorted(free))
        free.remove(worker)
        request = None if leaving and draw.random() < leaving else wants[worker]
        answers = handle(server, worker, request)
        for other, answer in answers:
            free.add(other)
            wants[other] = Pull() if answer is None else Push(own_element(other, workers))
        yield number, worker, request, answers


def check_pull(worker, number, parameters, bound, how):
    """Fail unless pull `number` of a worker sees what the bound promises."""
    for other, pushes in enumerate(parameters):
        if not number - bound <= pushes <= number + bound:
            limits = f"{max(0, number - bound)} to {number + bound}"
            case = f"bound {bound}, {how}: pull number {number} of worker {worker}"
            raise Wrong("wrong", f"pushes of worker {other} that it sees", limits, f"{pushes:g}", case)


@test(points=4)
def no_pull_sees_too_little_or_too_much(answer):
    """Pull number c sees all pushes of each worker before c - bound, and none from c + bound on."""
    for bound in (0, 1, 2, 3):
        pulls = [0, 0, 0]
        for _, _, _, answers in random_order(make_server(answer, 3, bound)):
            for worker, parameters in answers:
                if parameters is not None:
                    check_pull(worker, pulls[worker], parameters.tolist(), bound, "requests in a random order")
                    pulls[worker] += 1
        pushed, _, seen = run(answer, bound)
        for worker, step, parameters in seen:
            check_pull(worker, step, parameters, bound, "on the virtual clock")
        expect("pushes of each worker at the end", pushed, [12.0] * 4, case=f"bound {bound}")


@test(points=3)
def waits_no_longer_than_necessary(answer):
    """A request is answered as soon as the bound allows; without a bound no worker ever waits."""
    for bound in (0, 1, 2, 3, None):
        for workers, seed in ((1, 1), (2, 2), (3, 5), (4, 4)):
            compare_with_the_rule(answer, bound, workers, seed)


def compare_with_the_rule(answer, bound, workers, seed, leaving=0.0):
    """Compare all answers to requests in a random order, and the stalenesses, with the rule."""
    server, present = make_server(answer, workers, bound), set(range(workers))
    pulls, pushes, seen, waiting, staleness = [0] * workers, [0] * workers, [0] * workers, {}, []
    for number, worker, request, answers in random_order(server, seed, workers, leaving):
        expected = []
        if request is None:
            present.remove(worker)
        else:
            waiting[worker] = request
        while due := [each for each in waiting if is_due(each, waiting[each], pulls, pushes, bound, present)]:
            first = due[0]
            if isinstance(waiting.pop(first), Pull):
                pulls[first], seen[first] = pulls[first] + 1, sum(pushes)
                expected.append((first, [float(count) for count in pushes]))
            else:
                staleness.append(sum(pushes) - seen[first])
                pushes[first] += 1
                expected.append((first, None))
        what = "leaving" if request is None else type(request).__name__
        case = f"bound {bound}, {workers} workers, request {number + 1} of a random order: {what} of {worker}"
        expect("(worker, answer) of each due answer, in order", answers, expected, case=case)
        expect("server.staleness", server.staleness, staleness, case=case)


def is_due(worker, request, pulls, pushes, bound, present):
    """The rule, as counts: nothing that this answer must see is missing, and nobody must still not see this push."""
    if bound is None:
        return True
    if isinstance(request, Pull):
        return all(pushes[other] >= pushes[worker] - bound for other in present)
    return all(pulls[other] > pushes[worker] - bound for other in present)


@test(points=2)
def bound_is_reached(answer):
    """A larger bound lets workers be further apart, and wait less."""
    waits = []
    for bound in (0, 1, 3, None):
        _, timeline, seen = run(answer, bound)
        if bound is not None:
            ahead = max(max(parameters) - step for _, step, parameters in seen)
            expect(
                "clocks by which a pull is behind the fastest worker, at most",
                ahead,
                float(bound),
                case=f"bound {bound}",
            )
        waits.append(sum(timeline.waited_s))
    expect("whether a larger bound waits less", waits == sorted(waits, reverse=True), True)
    expect("seconds waited without a bound", waits[-1], 0.0)


@test(points=3)
def others_go_on_when_a_worker_leaves(answer):
    """A worker that leaves (request None) is waited for no more, and those that have waited for it are answered."""
    server = make_server(answer, 3, bound=0)
    for worker in (0, 1, 2):
        handle(server, worker, Pull())
    for worker in (0, 1):
        handle(server, worker, Push(own_element(worker, 3)))
    expect(
        "answers to the next pulls of workers 0 and 1", names(handle(server, 0, Pull()) + handle(server, 1, Pull())), []
    )
    due = names(handle(server, 2, None))
    expect("due answers when worker 2 leaves", due, [(0, "parameters"), (1, "parameters")])
    for bound in (0, 1, 2, None):
        for workers, seed in ((1, 1), (2, 2), (3, 3), (4, 4), (4, 5)):
            compare_with_the_rule(answer, bound, workers, seed, leaving=0.1)
    for bound in (0, 1, None):
        durations = Durations([1.0, 1.0, 4.0], [0.0] * 3, leave_s={2: 9.0})
        pushed, _, _ = run(answer, bound, durations, steps=8, workers=3)
        case = f"bound {bound}: worker 2 leaves after two of eight steps"
        expect("pushes of each worker", pushed, [8.0, 8.0, 2.0], case=case)
