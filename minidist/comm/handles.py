"""Operations in flight: reported to rank status and the meter, and owned by a handle until its `wait` returns."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.group import Group
from minidist.comm.meter import Record
from minidist.comm.status import Channel
from minidist.errors import CommError

Result = TypeVar("Result")

_CHECK_INTERVAL_S = 0.1


class _Hints(threading.local):
    """Hints of the current thread to the backend, set by `expect_immediate_wait`.

    expect_immediate_wait: whether this thread waits for each operation right after its launch. The backend then need
    not wake a worker thread: the waiting thread can run the operation itself.
    """

    expect_immediate_wait = False


HINTS = _Hints()


@contextlib.contextmanager
def expect_immediate_wait() -> Iterator[None]:
    """Tell the backend that, within this context, this thread waits for each operation right after the launch.

    The backend may then run the operation in the waiting thread instead of a worker thread.
    """
    HINTS.expect_immediate_wait = True
    try:
        yield
    finally:
        HINTS.expect_immediate_wait = False


@dataclass
class LaunchedOperation:
    """One launched operation, as rank status and the meter identify it.

    channel, seq: the operation's channel (see `Channel`), and its number there, from 1. name: the operation and its
    detail ("broadcast root 0"). shape, dtype: those of its tensor. record: its record in the meter.
    """

    channel: Channel
    seq: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    record: Record


class Handle:
    """An asynchronous operation. Owns its tensors until `wait()`, which may be called more than once.

    works: torch's handles; [] if the operation is complete already. launched: the operations that `works` carry out.
    tensors: kept alive until the wait. on_complete: called once, by `wait`, when the operation has completed.
    """

    def __init__(
        self,
        group: Group,
        works: Sequence,
        launched: Sequence[LaunchedOperation],
        tensors: Sequence[Tensor],
        on_complete: Callable[[], None] | None = None,
    ):
        self._group = group
        self._works = list(works)
        self._launched = list(launched)
        self._tensors = list(tensors)
        self._on_complete = on_complete

    def wait(self, host: bool = False) -> None:
        """Block until the results may be used.

        On CUDA only the current stream waits for the operation by default, and the host goes on; `host=True` blocks the
        host until the results are in memory. Raises CommError if the operation failed, or if this rank must abandon it
        (`World.must_abandon`).
        """
        if not self._works:
            return
        status = self._group.world.status
        meter = self._group.meter
        start_s = time.perf_counter()
        with meter.waiting([at.record for at in self._launched]):
            for i, work in enumerate(self._works):
                # A backend may batch several transfers into one work: the last launched one then stands for all.
                at = self._launched[i if len(self._works) == len(self._launched) else -1]
                status.on_wait(at.channel, at.seq, at.name, at.shape, at.dtype)
                try:
                    self._wait_for_work(work)
                    if any(tensor.is_cuda for tensor in self._tensors):
                        if host:
                            torch.cuda.current_stream().synchronize()
                        else:
                            status.on_pending(at.channel, at.seq, at.name, at.shape, at.dtype, work)
                except RuntimeError as error:
                    raise CommError(failure_message(at, self._group, error)) from error
                finally:
                    status.on_resume()
        meter.add_wait(time.perf_counter() - start_s)
        if self._on_complete is not None:
            self._on_complete()
        for at in self._launched:
            meter.on_wait_end(at.record)
        self._works = []
        self._tensors = []
        self._on_complete = None

    def _wait_for_work(self, work: dist.Work) -> None:
        """Wait for one of torch's works; with gloo, raise RuntimeError once `World.must_abandon` returns True."""
        must_abandon = self._group.world.must_abandon
        # gloo can lose an error: when a connection breaks, it does not wake the thread that waits for a send which it
        # has begun to write (`Pair::signalException` passes over the queue of writes). Only a timeout ends that wait.
        if must_abandon is None or not self._group.uses_gloo or work.is_completed():
            work.wait()
            return

        def raise_if_abandoned() -> None:
            if must_abandon():
                raise RuntimeError("another rank has died or left, and gloo has not ended the operation")

        wait_in_helper_thread(work.wait, raise_if_abandoned)


def wait_in_helper_thread(wait: Callable[[], Result], check: Callable[[], None] = lambda: None) -> Result:
    """Return the result of `wait()`, which a helper thread calls; the calling thread can meanwhile be interrupted.

    torch's own waits return only when the operation ends, and handle no signal until then. check: called every
    0.1 s; may raise to leave the wait, which the helper thread then goes on with. Raises what `wait` raises.
    """
    outcome: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(wait())
        except BaseException as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    while not done.wait(_CHECK_INTERVAL_S):
        check()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def failure_message(operation: LaunchedOperation, group: Group, error: Exception) -> str:
    """Return the message that names the failed operation, its group and the first line of the backend's error."""
    reason = str(error).strip().splitlines()[0]
    return f"{operation.name} #{operation.seq} {list(operation.shape)} {operation.dtype} of {group} failed: {reason}"


def launch(
    group: Group,
    name: str,
    tensor: Tensor,
    start: Callable[[], "dist.Work | Sequence[dist.Work]"],
    tensors: Sequence[Tensor],
    *,
    channel: Channel | None = None,
    detail: str = "",
    async_op: bool = False,
    on_complete: Callable[[], None] | None = None,
    **count,
) -> Handle | None:
    """Start an operation, after reporting it to rank status and recording it in the meter.

    Return its handle if `async_op`; otherwise wait for it and return None.
    name: the operation, as "all_reduce". tensor: the tensor whose size the meter counts. start: launches the operation
    in the backend and returns torch's work or works. tensors: kept alive until the wait. channel: None for the group's
    collectives. detail: the root or the reduction, such as "root 0". Name, detail, dtype and, except in an all-to-all,
    number of elements must be equal on all ranks. on_complete: called once, when the operation has completed; does the
    work that the backend leaves to this rank. count: further arguments of `Meter.record`. Raises CommError if the
    backend refuses the operation.
    """
    launched = report_launch(group, name, tensor, channel or group.collective_channel, detail, **count)
    try:
        with contextlib.nullcontext() if async_op else expect_immediate_wait():
            works = start()
    except RuntimeError as error:
        raise CommError(failure_message(launched, group, error)) from error
    works = works if isinstance(works, list) else [works]
    group.meter.on_launch([launched.record], works)
    return wait_unless_async(Handle(group, works, [launched], tensors, on_complete), async_op)


def report_launch(
    group: Group, name: str, tensor: Tensor, channel: Channel, detail: str = "", **count
) -> LaunchedOperation:
    """Report to rank status and meter that an operation will start; return its identity. Arguments as for `launch`."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    operation = f"{name} {detail}".rstrip()
    seq = group.world.status.on_launch(channel, operation, shape, dtype)
    record = group.meter.record(
        name,
        group.name,
        group.ranks,
        group.rank,
        seq,
        shape,
        tensor.dtype,
        device=str(tensor.device),
        peer=channel.peer,
        tag=channel.tag,
        **count,
    )
    return LaunchedOperation(channel, seq, operation, shape, dtype, record)


def wait_unless_async(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle if `async_op`; otherwise wait for it and return None."""
    if async_op:
        return handle
    handle.wait()
    return None


def completed_handle(group: Group, async_op: bool) -> Handle | None:
    """Return a handle whose `wait` returns at once, for an operation without communication; None unless `async_op`."""
    return Handle(group, [], [], []) if async_op else None
