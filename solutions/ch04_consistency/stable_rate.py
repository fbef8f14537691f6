"""How large a learning rate a delay allows: the solution, as it stands in minidist.tools.consistency.delay.

With theta_t = z^t the recursion becomes z^(delay + 1) - z^delay + lr * curvature = 0. For small rates all roots are
inside the unit circle. At the largest stable rate the first pair reaches it, at the angle phi = pi / (2 delay + 1),
and the parameter then oscillates with a period of 2 pi / phi = 4 delay + 2 updates: about half a period after the
gradient was right, it points in the wrong direction.

A delay of 8 allows a tenth of the rate without a delay. The experiment must look at many periods, because near the
boundary the oscillation grows or falls by a tiny factor per update, and it must compare largest values, because
single ones pass through 0. With a simulation of workers instead of a formula, the same question can be put to any
model.

Usual wrong answers:
* takes the angle for its sine where the delay is long
* the package's own
* compares the largest of the last values with a threshold, which a slow growth does not reach
* compares the largest of the last values with the first one: a stable oscillation stays above it for long
* one rate for all delays
* the rate for curvature 1
* divides by the square root of the curvature, as a frequency would
* the sine of an angle in degrees
* runs as many workers as the delay has updates, which is one too few
* 2 / (delay + 1), which is right for delays 0 and 1 only
* makes no experiment: compares the rate with the formula, which is right on a quadratic and nowhere else
* makes no experiment: compares the rate with the formula, written as a cosine
* a gradient without the curvature
* takes the loss for the gradient's coefficient, and forgets that the square brings a factor of 2
* makes a hundred updates, whatever num_updates is: less than a period of a long delay
* tells divergence as soon as a value exceeds the first one: stable oscillations overshoot at first, too
* compares the last value with the first one: an oscillation passes 0
* does not look for NaN, which is not larger than anything
* takes the delay for the number of workers
* waits for infinity, which a slow growth does not reach
* workers of different speeds: the delay varies
* compares the largest of four values with the four before: the period is 4 delay + 2 updates
* makes the updates, but lets the eigenvalues of the recursion decide
* the approximation for long delays, which allows pi / 2 times the rate without a delay
* stops as soon as the parameter exceeds 10, which is no overflow
* stops as soon as the parameter is almost 0, through which an oscillation passes
* a server with bound 0: all workers pull the same parameters, which is no constant delay
* rounds down the steps of each worker: up to `delay` updates are missing
* returns the ratio of the largest values
* zero for every delay
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
