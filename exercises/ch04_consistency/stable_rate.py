"""How large a learning rate a delay allows.

Gradient descent whose gradients arrive with a delay is stable up to a learning rate that falls with the delay. Write
max_stable_learning_rate, the formula for this rate on a quadratic, and diverges_with_delay, an experiment that returns
whether the parameter diverges with one learning rate.

The loss is curvature / 2 * theta^2, its gradient curvature * theta, and theta_{t+1} = theta_t - lr * curvature *
theta_{t - delay}, where theta_0 and all earlier ones are 1. lr and curvature are above 0; delay is an integer, 0 or
more. Example:
    max_stable_learning_rate(0, 1.0) is 2.0, (1, 1.0) is 1.0, (2, 1.0) is 0.618, and (1, 4.0) is 0.25
    diverges_with_delay(1.05, 1) is True: the parameter oscillates, and its largest values grow slowly
    diverges_with_delay(0.95, 1) is False: it oscillates as well, and its largest values fall

The experiment makes at least num_updates updates, one after the other, unless the parameter overflows before. You may
write it as a loop over theta, or with workers and a server on the virtual clock. It must not use theory: neither the
formula, in whatever form, nor the roots of a polynomial. A parameter that has become infinite or NaN has diverged.

Checked: the formula for delays 0 to 100, against the roots of the recursion's polynomial; the experiment for delays 0
to 9 and 40 with rates 2 % below and above the largest stable one, with a rate 0.05 % below it at delay 40 and one
0.002 % above it at delay 1, with several curvatures, and with rates that overflow; that it returns a bool, does not
call max_stable_learning_rate, and executes lines of Python for its updates; and, if it uses a Server, their number.

You may call:
    Server(parameters, update, num_workers)   calls update(parameters, gradient) at every push
    asynchronous_worker(compute_gradient, num_steps)   of your exercise 4.2; compute_gradient(parameters, step)
    run_on_virtual_clock(server, workers, Durations(compute_s, transfer_s))   lists of one number per worker
    math.sin(x), math.pi, math.isfinite(x), abs(x), max(values)

Check it with: python -m exercises check stable_rate

Stub cf74c5cb.
"""

import math

import torch

from minidist.simple.consistency import Server, asynchronous_worker
from minidist.tools.consistency.clock import Durations, run_on_virtual_clock


def max_stable_learning_rate(delay: int, curvature: float = 1.0) -> float:
    """Return the learning rate below which gradient descent with delayed gradients is stable, from theory.

    The function to minimise is a quadratic with second derivative `curvature`. delay: in updates.
    """
    raise NotImplementedError("return the largest stable rate")


def diverges_with_delay(lr: float, delay: int, curvature: float = 1.0, num_updates: int = 3000) -> bool:
    """Minimise a quadratic by asynchronous gradient descent; return whether the parameter diverges.

    lr: the learning rate. delay: the staleness of every gradient, in updates, as with delay + 1 equally fast workers
    that pull right after each push. curvature: the second derivative of the quadratic. num_updates: how many updates
    to simulate, at least.
    """
    raise NotImplementedError("return whether delayed descent on the quadratic grows at this rate")
