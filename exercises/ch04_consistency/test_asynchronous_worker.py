"""Tests of asynchronous_worker: a test answers its requests by hand, with other parameters at every pull."""

import inspect

import torch

from exercises.conditions import FLOATS, Declaration, Tensors, check_conditions
from exercises.testing import Wrong, expect, show, test
from minidist.simple.consistency import Pull, Push


class Gradients:
    """Computes 10 * parameters + step, and records what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, parameters, step):
        self.calls.append((parameters.tolist(), step))
        return 10 * parameters + step


def start(answer, gradients, num_steps):
    worker = answer.asynchronous_worker(gradients, num_steps)
    if not inspect.isgenerator(worker):
        raise Wrong("type", "asynchronous_worker must be a generator: it yields its requests", got=show(worker))
    return worker


def serve(worker, answers):
    """Answer all requests of a worker: each pull by the next of `answers`. Returns the requests."""
    requests, pulls, answer = [], iter(answers), None
    for _ in range(100):
        try:
            request = worker.send(answer)
        except StopIteration:
            return requests
        if isinstance(request, Pull):
            answer = next(pulls, torch.full((2,), -1.0)).clone()
            requests.append("Pull()")
        elif isinstance(request, Push):
            answer = None
            requests.append(["Push", request.gradient.tolist()])
        else:
            raise Wrong("type", "the worker must yield Pull() or Push(gradient)", "a Pull or a Push", show(request))
    return [*requests, "and so on, without end"]


def values(number):
    return torch.tensor([1.0 + number, -2.0 * number])


def describe(gradient):
    if not isinstance(gradient, torch.Tensor):
        return show(gradient)
    return [str(gradient.dtype), list(gradient.shape), gradient.tolist()]


def expected(num_steps):
    requests = []
    for step in range(num_steps):
        requests += ["Pull()", ["Push", (10 * values(step) + step).tolist()]]
    return requests


@test(points=2)
def pulls_and_pushes_in_turn(answer):
    """In every step the worker pulls, computes with the parameters that it has just pulled, and pushes the gradient."""
    for num_steps in (1, 2, 5):
        requests = serve(start(answer, Gradients(), num_steps), map(values, range(num_steps)))
        expect("the requests", requests, expected(num_steps), case=f"asynchronous_worker(compute, {num_steps})")
    given = [torch.arange(6.0).view(2, 3).double(), torch.tensor([0.5]).bfloat16(), torch.tensor(7), torch.zeros(0)]
    worker, case = start(answer, lambda parameters, step: given[step].clone(), 4), "parameters of two float32 numbers"
    for step, gradient in enumerate(given):
        worker.send(None)
        pushed = getattr(worker.send(values(step)), "gradient", None)
        what = f"the gradient that is pushed in step {step}: [dtype, shape, values]"
        expect(what, describe(pushed), describe(gradient), case=case)
    workers, pushed = [start(answer, Gradients(), 3) for _ in range(2)], ([], [])
    for step in range(3):
        for worker in workers:
            worker.send(None)
        for number, worker in enumerate(workers):
            pushed[number].append(worker.send(values(step + number)).gradient.tolist())
    every = [[(10 * values(step + number) + step).tolist() for step in range(3)] for number in range(2)]
    expect("the gradients that each of two workers pushes, which take turns", list(pushed), every)


@test(points=1)
def no_steps(answer):
    """With no step to take, the worker makes no request."""
    expect("the requests", serve(start(answer, Gradients(), 0), []), [], case="asynchronous_worker(compute, 0)")


@test(points=1)
def computes_once_per_step(answer):
    """`compute_gradient` is called once per step, with the number of the step, from 0."""
    gradients = Gradients()
    serve(start(answer, gradients, 4), map(values, range(4)))
    expect("calls: (parameters, step)", gradients.calls, [(values(n).tolist(), n) for n in range(4)])


@test(points=2)
def computes_between_pull_and_push(answer):
    """A gradient is computed after its pull was answered, and not before: other workers push meanwhile."""
    gradients = Gradients()
    worker = start(answer, gradients, 3)
    request, counts = next(worker), []
    for step in range(3):
        expect("a request", type(request).__name__, "Pull", case=f"step {step}")
        counts.append(len(gradients.calls))
        push = worker.send(values(step))
        counts.append(len(gradients.calls))
        request = worker.send(None) if step < 2 else push
    expect("gradients computed before and after each pull", counts, [0, 1, 1, 2, 2, 3])


@test(points=2)
def pulled_parameters_stay_as_they_are(answer):
    """The worker changes neither the parameters that it was sent nor a gradient that it has pushed."""
    worker, pushed = start(answer, lambda parameters, step: parameters * (step + 2), 3), []
    request = next(worker)
    for step in range(3):
        mine = values(step)
        pushed.append(worker.send(mine).gradient)
        try:
            request = worker.send(None)
        except StopIteration:
            request = None
        expect("the pulled parameters afterwards", mine, values(step), case=f"step {step}")
    expect("whether the worker has ended", request, None)
    expect("the pushed gradients afterwards", pushed, [values(step) * (step + 2) for step in range(3)])


def pushed_gradients(answer, group, parameters):
    """The gradients of three steps, of which the first is zero; every pull is answered by the same parameters."""
    worker, pushed = start(answer, lambda pulled, step: step * pulled, 3), []
    request = next(worker)
    for step in range(3):
        name = f"the request number {2 * step + 2}, after the parameters {show(parameters)}"
        push = worker.send(parameters)
        expect(name, type(push).__name__, "Push")
        pushed.append(push.gradient)
        request = next(worker, None)
    expect("whether the worker has ended", request, None)
    return pushed


DECLARATION = Declaration(
    inputs={"parameters": Tensors(dtypes=FLOATS)},
    call=pushed_gradients,
    reference=lambda ranks, rank: [step * ranks[0]["parameters"] for step in range(3)],
)


@test(points=2)
def holds_under_every_condition(answer, world, network):
    """Every gradient is pushed as it is: of any floating dtype, size and layout, and if it is zero or not finite."""
    check_conditions(DECLARATION, answer, world, network)
