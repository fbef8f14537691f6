"""An asynchronous worker: the solution, as it stands in minidist.simple.consistency.

The worker never waits for another worker, only for the server's answers. Between its pull and its push the server
applies the gradients of others, so its gradient belongs to parameters that are no longer there: it is stale. How
stale is a matter of the speeds, which the worker does not know.

A generator separates what a worker does from how its messages travel: on the virtual clock the caller decides when
each request arrives, and a run is the same twice; on live ranks the same requests are messages.

Usual wrong answers:
* the package's own
* yields the class Pull, and not a request
* computes the gradient a second time, only to look at its size
* computes all gradients for the parameters of the first pull
* takes the answer to the push for the next parameters; it is None
* pushes the sum of all its gradients so far
* takes one step too few
* returns an iterator over requests, which cannot receive answers
* updates the pulled parameters as well, as if they were its own
* does not push a gradient that is not finite, and so hides a divergence
* reuses one buffer for all gradients: a push that still waits at the server changes
* pulls once more at the end, and waits for an answer that nobody needs
* pulls in every step, and goes on with the parameters of the first pull
* pulls for the next step before it pushes, which makes every gradient staler by one push of its own
* pushes the gradient in float32, whatever its dtype
* converts the gradient to the dtype of the parameters
* passes step 0 every time: always the same batch
* counts the steps from 1, and skips the first batch
* never ends
* makes no request
* does not push a gradient that is zero: the server does not count this step
"""

from minidist.simple.consistency import ComputeGradient, Pull, Push, Worker


def asynchronous_worker(compute_gradient: ComputeGradient, num_steps: int) -> Worker:
    """Yield, `num_steps` times, a Pull and then the Push of a gradient at the pulled parameters."""
    for step in range(num_steps):
        parameters = yield Pull()
        yield Push(compute_gradient(parameters, step))
