"""The operations: every byte between ranks passes one of these functions.

Each takes a group and moves tensors in place. With `async_op=True` it returns a `Handle` at once, which owns the
tensors until `wait()`: do not read or write them before. On CUDA `wait()` orders streams and does not block the host.
Peers and roots are ranks *in the group*. Within a group every rank must launch the same operations in the same order.

A group of one rank has nobody to talk to: the operation does its local part and nothing is counted.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.board import Channel
from minidist.comm.group import Group
from minidist.comm.meter import Record
from minidist.errors import RunError

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renamed these two; the old names warn from then on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A line of these folders is never the line a person would look for.
_INSIDE = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.abspath(torch.__file__)))


class CommError(RunError):
    """An operation between ranks failed: a peer died, or the backend gave up."""


def caller_line() -> str:
    """`file:line` of the innermost frame outside this folder and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass
class _Launched:
    """One operation on its way: what the board and the meter call it."""

    channel: Channel
    seq: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    record: Record


class Handle:
    """An operation in flight. Owns its tensors until `wait()`, which may be called more than once."""

    def __init__(self, group: Group, works: Sequence, launched: Sequence[_Launched], tensors: Sequence[Tensor]):
        self._group, self._works, self._launched, self._tensors = group, list(works), list(launched), list(tensors)

    def wait(self) -> None:
        """Return when the results may be used. Raises CommError when the operation failed."""
        if not self._works:
            return
        board, meter = self._group.world.board, self._group.meter
        where = caller_line()
        for i, work in enumerate(self._works):
            # A backend may batch several transfers into one work: the last launched one then stands for all.
            at = self._launched[min(i, len(self._launched) - 1)]
            board.wait(at.channel, at.seq, at.name, at.shape, at.dtype, where)
            try:
                work.wait()
            except RuntimeError as error:
                raise CommError(_failure(at, self._group, error)) from error
            finally:
                board.resume()
        for at in self._launched:
            meter.waited(at.record)
        self._works, self._tensors = [], []


def _failure(at: _Launched, group: Group, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"{at.name} #{at.seq} {list(at.shape)} {at.dtype} of {group} failed: {reason}"


def _launch(
    group: Group,
    name: str,
    tensor: Tensor,
    start: Callable[[], "dist.Work | Sequence[dist.Work]"],
    tensors: Sequence[Tensor],
    *,
    channel: Channel | None = None,
    **count,
) -> Handle:
    """Announce the operation on the board, count it, start it."""
    launched = _announce(group, name, tensor, channel or group.collective, **count)
    try:
        works = start()
    except RuntimeError as error:
        raise CommError(_failure(launched, group, error)) from error
    return Handle(group, works if isinstance(works, list) else [works], [launched], tensors)


def _announce(group: Group, name: str, tensor: Tensor, channel: Channel, **count) -> _Launched:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    seq = group.world.board.launch(channel, name, shape, dtype)
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
        **count,
    )
    return _Launched(channel, seq, name, shape, dtype, record)


def _end(handle: Handle, async_op: bool) -> Handle | None:
    if async_op:
        return handle
    handle.wait()
    return None


def _done(group: Group, async_op: bool) -> Handle | None:
    return Handle(group, [], [], []) if async_op else None


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Handle | None:
    """Replace `tensor` (any shape) on every rank by the elementwise sum (max, min, product) over the group."""
    if group.size == 1:
        return _done(group, async_op)

    def start():
        return dist.all_reduce(tensor, op=REDUCE_OPS[op], group=group.process_group, async_op=True)

    return _end(_launch(group, "all_reduce", tensor, start, [tensor]), async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, group: Group, op: str = "sum", async_op: bool = False
) -> Handle | None:
    """Reduce `input` (size * n, ...) over the group and leave part `rank` of the result in `output` (n, ...)."""
    _check_parts("reduce_scatter", whole=input, part=output, group=group)
    if group.size == 1:
        output.copy_(input)
        return _done(group, async_op)

    def start():
        return _reduce_scatter(output, input, op=REDUCE_OPS[op], group=group.process_group, async_op=True)

    return _end(_launch(group, "reduce_scatter", input, start, [output, input]), async_op)


def all_gather(output: Tensor, input: Tensor, group: Group, async_op: bool = False) -> Handle | None:
    """Concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...) on every rank."""
    _check_parts("all_gather", whole=output, part=input, group=group)
    if group.size == 1:
        output.copy_(input)
        return _done(group, async_op)

    def start():
        return _all_gather(output, input, group=group.process_group, async_op=True)

    return _end(_launch(group, "all_gather", output, start, [output, input]), async_op)


def broadcast(tensor: Tensor, src: int, group: Group, async_op: bool = False) -> Handle | None:
    """Replace `tensor` on every rank by that of group rank `src`."""
    if group.size == 1:
        return _done(group, async_op)

    def start():
        return dist.broadcast(tensor, src=group.ranks[src], group=group.process_group, async_op=True)

    return _end(_launch(group, "broadcast", tensor, start, [tensor], root=src), async_op)


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Handle | None:
    """Send part i of `input` to rank i and receive its part for this rank as part i of `output`.

    The parts are consecutive along dimension 0: of equal length, or of the lengths given in rows by the splits.
    """
    if group.size == 1:
        output.copy_(input)
        return _done(group, async_op)
    row = input[0].numel() if input.shape[0] else 0
    splits = None if input_splits is None else [rows * row for rows in input_splits]

    def start():
        return dist.all_to_all_single(
            output,
            input,
            None if output_splits is None else list(output_splits),
            None if input_splits is None else list(input_splits),
            group=group.process_group,
            async_op=True,
        )

    return _end(_launch(group, "all_to_all", input, start, [output, input], splits=splits), async_op)


def send(tensor: Tensor, dst: int, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Send `tensor` to group rank `dst`, which must `recv` one of the same shape and dtype under the same tag."""
    _check_peer("send", dst, group)

    def start():
        return dist.isend(tensor, dst=group.ranks[dst], group=group.process_group, tag=tag)

    return _end(_launch(group, "send", tensor, start, [tensor], channel=group.transfer("send", dst, tag)), async_op)


def recv(tensor: Tensor, src: int, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Fill `tensor` with what group rank `src` sends to this rank under this tag."""
    _check_peer("recv", src, group)

    def start():
        return dist.irecv(tensor, src=group.ranks[src], group=group.process_group, tag=tag)

    return _end(_launch(group, "recv", tensor, start, [tensor], channel=group.transfer("recv", src, tag)), async_op)


@dataclass(frozen=True)
class Transfer:
    """One send or recv of a batch; `peer` is a rank in the group."""

    kind: str
    tensor: Tensor
    peer: int
    tag: int = 0


def batch(transfers: Sequence[Transfer], group: Group, async_op: bool = False) -> Handle | None:
    """Start all transfers together, so that no order among them can deadlock (NCCL demands it of concurrent ones)."""
    if not transfers:
        return _done(group, async_op)
    launched, number = [], group.meter.next_batch()
    for transfer in transfers:
        _check_peer(transfer.kind, transfer.peer, group)
        channel = group.transfer(transfer.kind, transfer.peer, transfer.tag)
        launched.append(_announce(group, transfer.kind, transfer.tensor, channel, batch=number))
    calls = {"send": dist.isend, "recv": dist.irecv}
    ops = [
        dist.P2POp(calls[t.kind], t.tensor, group.ranks[t.peer], group=group.process_group, tag=t.tag)
        for t in transfers
    ]
    try:
        works = dist.batch_isend_irecv(ops)
    except RuntimeError as error:
        raise CommError(_failure(launched[0], group, error)) from error
    return _end(Handle(group, works, launched, [t.tensor for t in transfers]), async_op)


def barrier(group: Group, async_op: bool = False) -> Handle | None:
    """Return when every rank of the group has called it."""
    if group.size == 1:
        return _done(group, async_op)
    nothing = torch.empty(0, device=group.world.control_device)

    def start():
        return dist.barrier(group=group.process_group, async_op=True)

    return _end(_launch(group, "barrier", nothing, start, []), async_op)


def _check_parts(name: str, whole: Tensor, part: Tensor, group: Group) -> None:
    if whole.numel() != part.numel() * group.size or whole.dtype != part.dtype:
        raise ValueError(
            f"{name} over {group.size} ranks: the whole has {whole.numel()} elements of {whole.dtype}, "
            f"the part {part.numel()} of {part.dtype}; the whole must be {group.size} parts of one dtype"
        )


def _check_peer(name: str, peer: int, group: Group) -> None:
    if not 0 <= peer < group.size or peer == group.rank:
        raise ValueError(f"{name} with peer {peer}: this is rank {group.rank} of {group.size} in {group}")
