"""Asynchronous workers inside the trainer: every rank pulls parameters, computes its gradient and pushes it.

One rank is the server: it alone has a `Server`, masters and optimizer states, and updates them after every push.
It is a worker as well. For each other worker it has a thread, which receives that worker's gradients and sends it
parameters: so the server answers while its rank computes, and waits for one worker without delaying another. There is
one server, not one per shard, so that a gradient belongs to one version of all parameters.

Ranks wait for each other only because of the staleness bound, and in a pause: after the steps in which the trainer
evaluates or saves, and after the last one, all gradients have been pushed and all ranks get the server's parameters. A
request to stop leads to a pause after the step of the fastest worker.

In rank status, a worker that waits for the server's answer waits for the server's rank. When the staleness bound or a
pause holds up the server's rank, that rank waits for the slowest worker to which it owes no answer. So a worker that
hangs is found, and the server's rank, for which the others wait as well, is not taken for it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from minidist.comm import Groups, Meter, all_reduce, broadcast, recv, send
from minidist.comm.status import LaunchOnlyTracker
from minidist.config import Config
from minidist.consistency.merge import Result
from minidist.consistency.server import Pull, Push, Server
from minidist.errors import UserError
from minidist.parallel.data.naive import NaiveReducer
from minidist.parameters import ParamSpecs


class AsynchronousReducer(NaiveReducer):
    """Gradient reducer of an asynchronous worker; on one rank, the server's, it also runs the server.

    parameters, specs: as in `GradientReducer`. groups: "grads" must have this rank alone, "outer" all ranks. num_steps:
    the number of steps of each worker. server: the `Server`; None on the other ranks. run_optimizer: set by the engine;
    updates the masters by their `.grad`. Its argument is the number of earlier updates divided by the number of
    workers, rounded down.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Groups, config: Config):
        super().__init__(parameters, specs, [groups["grads"]])
        how = config.consistency
        group = groups["outer"]
        meter = groups.meter
        if groups.world.backend == "nccl":
            raise UserError(f"consistency.mode {how.mode} transfers in threads: give --comm.backend shm or gloo.")
        self._group = group
        self._root = how.server
        self.num_steps = config.train.steps
        self._pause_every = [every for every in (config.train.eval_every, config.checkpoint.every) if every]
        self._launching = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, Tensor | None] = {}
        self._threads: list[threading.Thread] = []
        self._served: set[int] = set()  # the workers whose threads have not ended
        self._owed: set[int] = set()  # the workers whose messages have arrived and have not been answered
        self._num_messages: dict[int, int] = {}  # received from each worker
        self._error: Exception | None = None
        self._end = self._furthest = self._earlier_updates = 0
        self.run_optimizer: Callable[[int], None] = lambda step: None
        # A message: parameters or a gradient, then flags: whether each parameter has a gradient, and whether to stop.
        values = [parameter.detach().reshape(-1) for parameter in self._parameters.values()]
        self._sizes = [*(part.numel() for part in values), len(values) + 1]
        flat = torch.cat([*values, values[0].new_zeros(len(values) + 1)])
        self._zero_message = torch.zeros_like(flat, device="cpu")
        self._device = flat.device
        self.masters = {}
        self.server = None
        if group.rank == how.server:
            self.masters = dict(zip(self._parameters, self._split(flat), strict=True))
            self.server = Server(
                flat, self._apply_push, group.size, how.staleness_bound if how.mode == "stale" else None
            )
            meter = Meter(keep=False, operations=meter.operations, wire_bytes=meter.wire_bytes)  # without the waits
            self._num_messages = dict.fromkeys(range(group.size), 0)
        self.master_specs = {name: specs[name] for name in self.masters}
        self._status = status = group.world.status
        status = status if self.server is None else LaunchOnlyTracker(status)  # of the server's threads
        self._transfers = replace(group, meter=meter, world=replace(group.world, status=status))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the masters by name, on the server's rank; {} on the other ranks."""
        return dict(self.masters)

    def names_to_update(self, update_group: None) -> list[str]:
        """Return the names of the masters with a gradient; [] on ranks without the server. update_group: unused."""
        return [name for name, master in self.masters.items() if master.grad is not None]

    @torch.no_grad()
    def after_load(self) -> None:
        """Collective, after a load and in every pause: overwrite all ranks' parameters with the server's."""
        flat = self._zero_message.to(self._device) if self.server is None else self.server.parameters
        broadcast(flat, self._root, self._group)
        self._copy_to_model(flat)

    # -- the worker ---------------------------------------------------------------------------------------------------

    def exchange(self, step: int, share: float, result: Result) -> Result:
        """Push this worker's gradient; then pull the parameters of its next step or, if due, pause with all ranks.

        step: the number of the step, from 0. share: the factor of the gradient, this worker's fraction of the weighted
        tokens of the global batch; 0: no update. Returns `result`, in which only a pause sets stop_requested, if any
        rank was asked to stop, and checkpoint_written, if all ranks have written their files.
        """
        message = self._zero_message.clone()
        parameters = None
        flags = message[-self._sizes[-1] :]
        flags[-1] = result.stop_requested
        for i, (parameter, part) in enumerate(zip(self._parameters.values(), self._split(message), strict=True)):
            if share and parameter.grad is not None:
                flags[i] = 1
                part.copy_(parameter.grad * share)
        if self.server is not None:
            parameters = self._push_and_pull(self._root, message, step + 1)
        else:
            self._transfer(send, message, self._root)
            if step + 1 < self._next_pause(step):
                self._transfer(recv, message, self._root)
                parameters = None if flags[-1] else message
        if parameters is None:
            return self._pause(result)
        self._copy_to_model(parameters)
        return replace(result, stop_requested=False, checkpoint_written=False)

    def _pause(self, result: Result) -> Result:
        """Collective: wait until all gradients have been pushed, and give all ranks the server's parameters.

        Returns `result` with stop_requested and checkpoint_written of all ranks.
        """
        with self._changed:
            self._wait_for_workers(lambda: not self._served)
        for thread in self._threads:
            thread.join()
        self.after_load()
        flags = [float(result.stop_requested), float(not result.checkpoint_written)]
        counts = torch.tensor(flags, device=self._group.world.control_device)
        all_reduce(counts, self._group, async_op=True).wait(host=True)
        return replace(result, stop_requested=counts[0].item() > 0, checkpoint_written=counts[1].item() == 0)

    def _next_pause(self, step: int) -> int:
        """Return the number of completed steps at the first pause after `step` completed steps."""
        return min([self.num_steps, *(every * (step // every + 1) for every in self._pause_every)])

    @torch.no_grad()
    def _copy_to_model(self, flat: Tensor) -> None:
        """Overwrite this rank's parameters with those of a message. flat: the message."""
        for parameter, part in zip(self._parameters.values(), self._split(flat), strict=True):
            parameter.copy_(part)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a message without the flags, as views with the parameters' shapes."""
        pairs = zip(flat.split(self._sizes)[:-1], self._parameters.values(), strict=True)
        return [part.view(parameter.shape) for part, parameter in pairs]

    def _transfer(self, operation: Callable, message: Tensor, peer: int) -> None:
        """Send or receive a message and wait for it. operation: `send` or `recv`. peer: the other worker's rank."""
        with self._launching:  # counting in the meter is not thread-safe
            handle = operation(message, peer, self._transfers, async_op=True)
        handle.wait()

    # -- the server ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """On the server's rank, start the server's threads after a pause. step: the number of completed steps."""
        if self.server is None or step < self._end:
            return
        self._end = self._next_pause(step)
        self._furthest = step + 1
        workers = range(self._group.size)
        self._earlier_updates = step * len(workers) - len(self.server.staleness)
        for worker in workers:
            self.server.handle(worker, Pull())  # it got the parameters in the pause
        others = [worker for worker in workers if worker != self._root]
        end = self._end
        self._served = set(others)
        self._threads = [threading.Thread(target=self._serve, args=(each, step, end), daemon=True) for each in others]
        for thread in self._threads:
            thread.start()

    def _serve(self, worker: int, step: int, end: int) -> None:
        """In a thread: receive a worker's gradients and send it parameters until the pause after `end` steps."""
        message = self._zero_message.clone()
        parameters = self._zero_message
        try:
            while parameters is not None:
                self._transfer(recv, message, worker)
                step += 1
                parameters = self._push_and_pull(worker, message, step)
                if step < end:  # otherwise the worker expects the pause
                    self._transfer(send, self._zero_message + 1 if parameters is None else parameters.cpu(), worker)
                with self._changed:
                    self._owed.discard(worker)
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
        with self._changed:
            self._served.discard(worker)
            self._changed.notify_all()

    def _push_and_pull(self, worker: int, message: Tensor, step: int) -> Tensor | None:
        """Push a gradient; return the parameters of the worker's next step, None if it pauses after `step` steps."""
        with self._changed:
            if worker != self._root:
                self._num_messages[worker] += 1
                self._owed.add(worker)
            if message[-1]:
                self._end = self._furthest
            self._request(worker, Push(message.to(self._device)))
            if step >= self._end:
                return None
            self._furthest = max(self._furthest, step + 1)
            return self._request(worker, Pull())

    def _request(self, worker: int, request: Pull | Push) -> Tensor | None:
        """Return the server's answer when it is due. The caller has locked `_changed`."""
        self._answers.update(self.server.handle(worker, request))
        self._changed.notify_all()
        if worker == self._root:
            self._wait_for_workers(lambda: worker in self._answers)
        else:
            self._changed.wait_for(lambda: worker in self._answers or self._error is not None)
            if self._error is not None:
                raise self._error
        return self._answers.pop(worker)

    def _wait_for_workers(self, is_done: Callable[[], bool]) -> None:
        """In the thread that trains, wait until `is_done()`, and report to rank status which worker is awaited.

        The caller has locked `_changed`. A thread's error is raised here.
        """
        while self._error is None and not is_done():
            awaited = self._served - self._owed
            with self._launching:  # rank status is not thread-safe
                if awaited:
                    slowest = min(awaited, key=lambda worker: (self._num_messages[worker], worker))
                    channel = self._group.transfer_channel("recv", slowest, 0)
                    shape, dtype = tuple(self._zero_message.shape), str(self._zero_message.dtype).removeprefix("torch.")
                    self._status.on_wait(channel, self._num_messages[slowest] + 1, "recv", shape, dtype)
                else:
                    self._status.on_resume()
            self._changed.wait()
        with self._launching:
            self._status.on_resume()
        if self._error is not None:
            raise self._error

    def _apply_push(self, _: Tensor, message: Tensor) -> None:
        """Set the masters' gradients to those of a pushed message and run the optimizer, unless it has no gradient.

        The first argument, the server's flat parameters, is not needed: the masters are views of it.
        """
        flags = message[-self._sizes[-1] :].tolist()
        for master, part, used in zip(self.masters.values(), self._split(message), flags[:-1], strict=True):
            master.grad = part if used else None
        if any(flags[:-1]):
            self.run_optimizer((self._earlier_updates + len(self.server.staleness)) // self._group.size)
