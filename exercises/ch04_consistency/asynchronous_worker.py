"""An asynchronous worker.

An asynchronous worker waits for no other worker: it pulls the parameters, computes a gradient, and pushes it. Write
it as a generator, so that the same code runs on live ranks and on a virtual clock: the generator yields requests, and
its caller sends the answers into it.

`parameters = yield Pull()` requests the parameters and gets a copy of them; `yield Push(gradient)` requests an
update, and gets None after the update. Example: with compute_gradient(parameters, step) = 10 * parameters + step and
two steps,
    Pull()  answered by [1.0]  ->  Push([10.0])  answered by None  ->  Pull()  answered by [4.0]  ->  Push([41.0])
and then the generator ends.

Checked: the requests in their order, with other parameters at every pull; that each gradient is computed once, after
the pull and before the push of its step, with the number of that step; that the worker pushes every gradient as it is,
whatever its dtype and size, also if it is zero or has NaN; and that the worker changes neither the parameters that it
has pulled nor the gradients that it has pushed.

You may call:
    Pull(), Push(gradient)   the requests
    compute_gradient(parameters, step) -> gradient   step: from 0

Check it with: python -m exercises check asynchronous_worker

Stub bed6418b.
"""

from minidist.simple.consistency import ComputeGradient, Pull, Push, Worker


def asynchronous_worker(compute_gradient: ComputeGradient, num_steps: int) -> Worker:
    """Yield, `num_steps` times, a Pull and then the Push of a gradient at the pulled parameters."""
    raise NotImplementedError("pull, compute and push, num_steps times")
