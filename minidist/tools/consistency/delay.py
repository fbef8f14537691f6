"""Delayed gradient descent on a quadratic: the largest stable learning rate, measured and in theory.

theta_{t+1} = theta_t - lr * curvature * theta_{t-delay} is stable if and only if lr * curvature is below
2 sin(pi / (2 (2 delay + 1))): 2 without a delay, 1 with a delay of 1, and then about pi / (2 delay + 1). On this
boundary a root of z^(delay+1) - z^delay + lr * curvature = 0 lies on the unit circle.

`python -m minidist.tools.consistency.delay` prints the table.
"""

import math

import torch

from minidist.simple.consistency import Server, asynchronous_worker
from minidist.tools.consistency.clock import Durations, run_on_virtual_clock


def max_stable_learning_rate(delay: int, curvature: float = 1.0) -> float:
    """Return the learning rate below which gradient descent with delayed gradients is stable, from theory.

    The function to minimise is a quadratic with second derivative `curvature`. delay: in updates.
    """
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1))) / curvature


def diverges_with_delay(lr: float, delay: int, curvature: float = 1.0, num_updates: int = 3000) -> bool:
    """Minimise a quadratic by asynchronous gradient descent; return whether the parameter diverges.

    lr: the learning rate. delay: the staleness of every gradient, in updates, as with delay + 1 equally fast workers
    that pull right after each push. curvature: the second derivative of the quadratic. num_updates: how many updates
    to simulate, at least.
    """
    path = [1.0]

    def update(parameters: torch.Tensor, gradient: torch.Tensor) -> None:
        parameters.sub_(gradient, alpha=lr)
        path.append(abs(float(parameters)))

    workers = delay + 1
    server = Server(torch.ones((), dtype=torch.float64), update, workers)
    steps = -(-num_updates // workers)
    made = [asynchronous_worker(lambda values, step: curvature * values, steps) for _ in range(workers)]
    run_on_virtual_clock(server, made, Durations([1.0] * workers, [0.0] * workers))
    if not math.isfinite(path[-1]):
        return True
    window = len(path) // 4  # longer than a period of the oscillation
    return max(path[-window:]) > max(path[window : 2 * window])


def measure_max_stable_learning_rate(delay: int, curvature: float = 1.0, precision: float = 0.005) -> float:
    """Find by bisection, with `diverges_with_delay`, the largest learning rate that is stable.

    delay, curvature: as in `diverges_with_delay`. precision: relative width of the last interval.
    """
    low, high = 0.0, 4.0 / curvature
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if diverges_with_delay(middle, delay, curvature) else (middle, high)
    return (low + high) / 2


if __name__ == "__main__":
    print("delay  largest stable rate x curvature: measured  in theory  difference")
    for delay in range(9):
        measured, theory = measure_max_stable_learning_rate(delay), max_stable_learning_rate(delay)
        print(f"{delay:>5}  {measured:>41.4f}  {theory:>9.4f}  {measured / theory - 1:>10.2%}")
