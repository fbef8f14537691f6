"""Operations in flight: launched with rank status and meter, and owned by a handle until they are waited for."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.group import Group
from minidist.comm.hints import wait_follows
from minidist.comm.meter import Record
from minidist.comm.status import Channel
from minidist.errors import RunError


class CommError(RunError):
    """An operation between ranks failed: a peer died, or the backend aborted it."""

    of_some_ranks = True


@dataclass
class Launched:
    """One operation in flight: how rank status and the meter identify it."""

    channel: Channel
    seq: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    record: Record


class Handle:
    """An asynchronous operation. Owns its tensors until `wait()`, which may be called more than once."""

    def __init__(
        self,
        group: Group,
        works: Sequence,
        launched: Sequence[Launched],
        tensors: Sequence[Tensor],
        then: Callable[[], None] | None = None,
    ):
        self._group, self._works, self._launched, self._tensors = group, list(works), list(launched), list(tensors)
        self._then = then

    def wait(self, host: bool = False) -> None:
        """Block until the results may be used.

        On CUDA the default orders the current stream after the operation and does not block the host; `host=True`
        blocks the host until the results are in memory. Raises CommError if the operation failed.
        """
        if not self._works:
            return
        status, meter = self._group.world.status, self._group.meter
        with meter.waiting([at.record for at in self._launched]):
            for i, work in enumerate(self._works):
                # A backend may batch several transfers into one work: the last launched one then stands for all.
                at = self._launched[i if len(self._works) == len(self._launched) else -1]
                status.wait(at.channel, at.seq, at.name, at.shape, at.dtype)
                try:
                    work.wait()
                    if host and any(tensor.is_cuda for tensor in self._tensors):
                        torch.cuda.current_stream().synchronize()
                except RuntimeError as error:
                    raise CommError(failure(at, self._group, error)) from error
                finally:
                    status.resume()
        if self._then is not None:
            self._then()
        for at in self._launched:
            meter.waited(at.record)
        self._works, self._tensors, self._then = [], [], None


def failure(at: Launched, group: Group, error: Exception) -> str:
    """Return the message for an operation that failed."""
    reason = str(error).strip().splitlines()[0]
    return f"{at.name} #{at.seq} {list(at.shape)} {at.dtype} of {group} failed: {reason}"


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
    then: Callable[[], None] | None = None,
    **count,
) -> Handle | None:
    """Report the operation to rank status, count it and start it. Return its handle if `async_op`; otherwise wait.

    start: launches the operation in the backend and returns torch's work or works. tensors: kept alive until the wait.
    detail: the root or the reduction, on which all ranks must agree besides name, number of elements and dtype.
    then: called once the operation has completed, for the work left to this rank. count: further arguments of
    `Meter.record`. Raises CommError if the backend refuses the operation.
    """
    launched = announce(group, name, tensor, channel or group.collective, detail, **count)
    try:
        with contextlib.nullcontext() if async_op else wait_follows():
            works = start()
    except RuntimeError as error:
        raise CommError(failure(launched, group, error)) from error
    works = works if isinstance(works, list) else [works]
    group.meter.started([launched.record], works)
    return end(Handle(group, works, [launched], tensors, then), async_op)


def announce(group: Group, name: str, tensor: Tensor, channel: Channel, detail: str = "", **count) -> Launched:
    """Report an operation that is about to start to rank status and meter; see `launch`."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    operation = f"{name} {detail}".rstrip()
    seq = group.world.status.launch(channel, operation, shape, dtype)
    record = group.meter.record(
        name,
        group.use,
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
    return Launched(channel, seq, operation, shape, dtype, record)


def end(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle if `async_op`; otherwise wait for it."""
    if async_op:
        return handle
    handle.wait()
    return None


def done(group: Group, async_op: bool) -> Handle | None:
    """Return the handle of an operation that is complete already, as in a group of one; None unless `async_op`."""
    return Handle(group, [], [], []) if async_op else None
