"""The recording backend of torch.distributed: a process group that records every operation and passes it on.

Everything built on torch.distributed goes through it (raw `dist` calls, DDP, FSDP2, DTensor), so the traffic meter
(`comm.meter`), which counts the bytes sent, also sees traffic that does not use `minidist.comm`.
`register_recording_backend(meter)` registers the backend with torch as "recorded". Groups with `backend="recorded"`
write the same records as `minidist.comm` and report each operation to the rank status, from which deadlocks are
detected, so a deadlock of raw calls is explained too.

torch calls a process group through method names that differ between releases (`_allgather_base` is `all_gather_single`
from 2.13 on); every name is overridden here, and a test compares them with torch's.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options are not in torch.distributed's own namespace

from minidist.comm.collectives import REDUCE_OPS
from minidist.comm.meter import Meter, Record
from minidist.comm.status import Channel, OperationTracker
from minidist.tools.torch_group import create_torch_group

NAME = "recorded"
_NO_DESCRIPTION = ("undefined", "default_pg")  # torch's descriptions of groups without one


# Waits for a torch work handle; a duration of 0 means the group's own timeout.
WaitFunction = Callable[[dist.Work, timedelta], bool]


def register_recording_backend(
    meter: Meter,
    status: OperationTracker | None = None,
    group_name: str = "torch",
    wait_function: WaitFunction | None = None,
) -> str:
    """Register the backend "recorded" with torch, whose groups record every operation; return "recorded".

    Call this once, before groups exist. meter: receives a record of each operation. status: receives each launch and
    wait; None: a new `OperationTracker`. group_name: the groups' name in the records; the description of a group, if it
    has one, is appended. wait_function: called with a work handle and a timeout to wait for an operation, so that the
    caller can make waits interruptible; None: torch's own wait.
    """
    status = status if status is not None else OperationTracker()

    def create(options, _backend_options) -> RecordingGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        inner = create_torch_group(options.store, options.group_rank, options.group_size, options.timeout)
        return RecordingGroup(inner, ranks, meter, status, group_name, options.group_id, wait_function or _wait)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    return NAME


# Tensors that only a backend references, by id: see `is_backend_reference`.
_BACKEND_REFERENCES: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def is_backend_reference(tensor: Tensor) -> bool:
    """Whether a tensor was made to be passed to a recorded backend, and shares the memory of the caller's tensor.

    A backend's thread drops its tensors some time after the operation has ended, later on a busy machine. Whoever
    counts live tensors leaves these out; the caller's own tensor is freed as soon as the caller drops it.
    """
    return _BACKEND_REFERENCES.get(id(tensor)) is tensor


def wait_until_dropped(timeout_s: float) -> None:
    """Wait until the backends' threads have dropped all tensors that they were passed, at most so long."""
    deadline = time.monotonic() + timeout_s
    while _BACKEND_REFERENCES and time.monotonic() < deadline:
        time.sleep(1e-3)


def _make_backend_references(value: Any) -> Any:
    """Return the value with a new object for each tensor's memory, also in nested lists: the backend may keep those."""
    if isinstance(value, list):
        return [_make_backend_references(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    reference = value.detach()
    _BACKEND_REFERENCES[id(reference)] = reference
    return reference


class _InnerGroup:
    """A torch process group whose methods get backend references of the tensors with which they are called."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return lambda *args: method(*map(_make_backend_references, args))


def _wait(work: dist.Work, timeout: timedelta) -> bool:
    """Wait for `work`, which the backend limits to `timeout`; zero: its own limit."""
    return work.wait(timeout) if timeout else work.wait()


class _RecordedWork(dist.Work):
    """A torch work handle whose wait is reported to the rank status and recorded in the meter."""

    def __init__(
        self, work: dist.Work, status: OperationTracker, meter: Meter, at: tuple, record: Record, wait: WaitFunction
    ):
        super().__init__()
        self._work, self._status, self._meter, self._at, self._record = work, status, meter, at, record
        self._wait = wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation, as `dist.Work.wait` does; report and record the wait."""
        self._status.on_wait(*self._at)
        try:
            done = self._wait(self._work, timeout)
        finally:
            self._status.on_resume()
        self._meter.on_wait_end(self._record)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self):
        return self._work.exception()

    def get_future(self):
        return self._work.get_future()

    def result(self):
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._work.source_rank()


def _reduce_op_name(opts) -> str:
    """The name of the reduction; empty for a sum."""
    names = [name for name, op in REDUCE_OPS.items() if opts.reduceOp == op and name != "sum"]
    return names[0] if names else ""


class RecordingGroup(dist.ProcessGroup):
    """A torch process group that records its operations and passes them on to another process group, `inner`.

    torch calls its methods, whose arguments and results are those of `dist.ProcessGroup`. Only a receive from any rank
    is not recorded (`recv_anysource`). ranks: global ranks, ascending. meter: receives a record of each operation, or
    of each of its tensors if an operation has several. status: receives each launch and wait. group_name: the group's
    name in the records, to which torch's description of the group and, for a further group of the same name and ranks,
    its number are appended. name: torch's name of the group. wait: called with a work handle and a timeout to wait for
    an operation.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        ranks: tuple[int, ...],
        meter: Meter,
        status: OperationTracker,
        group_name: str,
        name: str,
        wait: WaitFunction = _wait,
    ):
        super().__init__(inner.rank(), inner.size())
        self._inner, self.ranks, self._meter, self._status = _InnerGroup(inner), ranks, meter, status
        self._name, self._wait = name, wait
        self._set_recorded_name(group_name)

    def _set_recorded_name(self, group_name: str) -> None:
        """Number groups of the same name and ranks in the order of creation, which is the same on all ranks.

        (`_set_group_name` is torch's own method of a process group, and sets torch's name.)
        """
        there = [group for group in dist.distributed_c10d._world.pg_group_ranks if isinstance(group, RecordingGroup)]
        before = sum((group.base_name, group.ranks) == (group_name, self.ranks) for group in there if group is not self)
        self.base_name, self._recorded_name = group_name, f"{group_name} {before + 1}" if before else group_name

    def _set_group_desc(self, text: str) -> None:
        if text not in _NO_DESCRIPTION:  # without one the name stays as it is
            self._set_recorded_name(f"{self.base_name}: {text}")

    def _run(
        self,
        name: str,
        counted: Sequence[Tensor],
        call: Callable[[], dist.Work],
        *,
        numel: int | None = None,
        channel: Channel | None = None,
        detail: str = "",
        **count,
    ) -> dist.Work:
        """Record an operation and start it by `call`; return a work handle whose wait is recorded, too.

        name: of the operation. counted: one record is made for each of these tensors. numel: elements of a record;
        None: the tensor's own. channel: None for the group's collectives. detail: what must be equal on all ranks
        besides name, elements and dtype. count: further arguments of `Meter.record`.
        """
        channel = channel or Channel("collective", self._recorded_name, self.ranks)
        signature = f"{name} {detail}".rstrip()
        for tensor in counted:
            shape = tuple(tensor.shape) if numel is None else (numel,)
            dtype = str(tensor.dtype).removeprefix("torch.")
            seq = self._status.on_launch(channel, signature, shape, dtype)
            record = self._meter.record(
                name,
                self._recorded_name,
                self.ranks,
                self.rank(),
                seq,
                shape,
                tensor.dtype,
                device=str(tensor.device),
                peer=channel.peer,
                tag=channel.tag,
                **count,
            )
        work = call()
        # Some backends complete small operations immediately and return no handle.
        at = (channel, seq, signature, shape, dtype)
        return work and _RecordedWork(work, self._status, self._meter, at, record, self._wait)

    def _make_root_arguments(self, opts) -> dict:
        """Return the arguments of `_run` for an operation with a root."""
        return {"root": opts.rootRank, "detail": f"root {self.ranks[opts.rootRank]}"}

    # -- whole tensors ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=c10d.AllreduceOptions()):
        """All-reduce each of `tensors` in place through the inner group; record an "all_reduce" for each.

        Returns a `dist.Work`.
        """
        return self._run(
            "all_reduce", tensors, lambda: self._inner.allreduce(tensors, opts), detail=_reduce_op_name(opts)
        )

    def allreduce_coalesced(self, tensors, opts=c10d.AllreduceCoalescedOptions()):
        """All-reduce all `tensors` in place, in one call of the inner group; record an "all_reduce" for each.

        Returns a `dist.Work`.
        """
        return self._run(
            "all_reduce", tensors, lambda: self._inner.allreduce_coalesced(tensors, opts), detail=_reduce_op_name(opts)
        )

    def broadcast(self, tensors, opts=c10d.BroadcastOptions()):
        """Broadcast `tensors` from group rank `opts.rootRank` through the inner group; record a "broadcast" for each.

        Returns a `dist.Work`.
        """
        return self._run(
            "broadcast", tensors, lambda: self._inner.broadcast(tensors, opts), **self._make_root_arguments(opts)
        )

    def reduce(self, tensors, opts=c10d.ReduceOptions()):
        """Reduce `tensors` to group rank `opts.rootRank` through the inner group; record a "reduce" for each tensor.

        Returns a `dist.Work`.
        """
        return self._run(
            "reduce", tensors, lambda: self._inner.reduce(tensors, opts), **self._make_root_arguments(opts)
        )

    def barrier(self, opts=c10d.BarrierOptions()):
        """Run the inner group's barrier and record a "barrier" of 0 bytes. Returns a `dist.Work`."""
        return self._run("barrier", [torch.empty(0)], lambda: self._inner.barrier(opts))

    # -- all-gather ---------------------------------------------------------------------------------------------------

    def allgather(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        """Copy the input of rank i to `outputs[0][i]` of every rank through the inner group; record an "all_gather".

        The record counts the elements of all outputs. Returns a `dist.Work`.
        """
        numel = sum(part.numel() for part in outputs[0])
        return self._run("all_gather", inputs, lambda: self._inner.allgather(outputs, inputs, opts), numel=numel)

    def allgather_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        """All-gather several tensors in one call of the inner group; record an "all_gather" for each input.

        The records count the elements of the gathered tensors. Returns a `dist.Work`.
        """
        # The gathered tensor is counted: meta tensors stand for results that exist only as lists of parts.
        whole = [torch.empty(self.size() * x.numel(), dtype=x.dtype, device="meta") for x in inputs]
        return self._run("all_gather", whole, lambda: self._inner.allgather_coalesced(outputs, inputs, opts))

    def all_gather_single(self, output, input, opts=c10d.AllgatherOptions()):
        """Concatenate `input` of all ranks into `output` through the inner group; record an "all_gather".

        Returns a `dist.Work`.
        """
        call = getattr(self._inner, "all_gather_single", None) or self._inner._allgather_base
        return self._run("all_gather", [output], lambda: call(output, input, opts))

    def all_gather_single_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        """All-gather several tensors in one call of the inner group; record an "all_gather" for each of `outputs`.

        Returns a `dist.Work`.
        """
        call = getattr(self._inner, "all_gather_single_coalesced", None) or self._inner.allgather_into_tensor_coalesced
        return self._run("all_gather", outputs, lambda: call(outputs, inputs, opts))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # -- reduce-scatter -----------------------------------------------------------------------------------------------

    def reduce_scatter(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        """Reduce `inputs[0][i]` of all ranks into the output of rank i through the inner group.

        Records a "reduce_scatter" with the elements of all inputs. Returns a `dist.Work`.
        """
        numel = sum(part.numel() for part in inputs[0])
        return self._run(
            "reduce_scatter", outputs, lambda: self._inner.reduce_scatter(outputs, inputs, opts),
            numel=numel, detail=_reduce_op_name(opts),
        )  # fmt: skip

    def reduce_scatter_single(self, output, input, opts=c10d.ReduceScatterOptions()):
        """Reduce `input` over the ranks through the inner group; write part i of the result to `output` of rank i.

        Parts are equal. Records a "reduce_scatter". Returns a `dist.Work`.
        """
        call = getattr(self._inner, "reduce_scatter_single", None) or self._inner._reduce_scatter_base
        return self._run("reduce_scatter", [input], lambda: call(output, input, opts), detail=_reduce_op_name(opts))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        """Reduce-scatter several tensors in one call of the inner group; record a "reduce_scatter" for each input.

        Returns a `dist.Work`.
        """
        call = (
            getattr(self._inner, "reduce_scatter_single_coalesced", None) or self._inner.reduce_scatter_tensor_coalesced
        )
        return self._run("reduce_scatter", inputs, lambda: call(outputs, inputs, opts), detail=_reduce_op_name(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- all-to-all, gather and scatter --------------------------------------------------------------------------------

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=c10d.AllToAllOptions()):
        """Send part j of `input` to rank j through the inner group; part i of `output` comes from rank i.

        Records an "all_to_all". output_splits, input_splits: number of rows of each part; empty for equal parts.
        Returns a `dist.Work`.
        """
        call = getattr(self._inner, "all_to_all_single", None) or self._inner.alltoall_base
        row = input[0].numel() if input.dim() and input.shape[0] else 0
        splits = [rows * row for rows in input_splits] or None
        return self._run(
            "all_to_all", [input], lambda: call(output, input, output_splits, input_splits, opts), splits=splits
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=c10d.AllToAllOptions()):
        """Send `inputs[i]` to rank i and receive `outputs[i]` from rank i through the inner group.

        Records one "all_to_all" for all tensors. Returns a `dist.Work`.
        """
        splits = [part.numel() for part in inputs]
        return self._run(
            "all_to_all", inputs[:1], lambda: self._inner.alltoall(outputs, inputs, opts),
            numel=sum(splits), splits=splits,
        )  # fmt: skip

    def gather(self, outputs, inputs, opts=c10d.GatherOptions()):
        """Collect the inputs of all ranks on group rank `opts.rootRank` through the inner group; record a "gather".

        outputs: on the root, one list with a tensor per rank. Returns a `dist.Work`.
        """
        return self._run(
            "gather", inputs, lambda: self._inner.gather(outputs, inputs, opts), **self._make_root_arguments(opts)
        )

    def scatter(self, outputs, inputs, opts=c10d.ScatterOptions()):
        """Send a tensor of `inputs` of rank `opts.rootRank` to each rank through the inner group; record a "scatter".

        inputs: on the root, one list with a tensor per group rank. Returns a `dist.Work`.
        """
        return self._run(
            "scatter", outputs, lambda: self._inner.scatter(outputs, inputs, opts), **self._make_root_arguments(opts)
        )

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _transfer(self, kind: str, tensors, peer: int, tag: int, call) -> dist.Work:
        """Record and start a "send" or "recv" with group rank `peer`; return its work handle."""
        channel = Channel(kind, self._recorded_name, self.ranks, self.ranks[peer], tag)
        return self._run(kind, tensors, call, channel=channel)

    def send(self, tensors, peer, tag=0):
        """Send `tensors` to group rank `peer` through the inner group; record a "send". Returns a `dist.Work`."""
        return self._transfer("send", tensors, peer, tag, lambda: self._inner.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag=0):
        """Receive `tensors` from group rank `peer` through the inner group; record a "recv", which sends 0 bytes.

        Returns a `dist.Work`.
        """
        return self._transfer("recv", tensors, peer, tag, lambda: self._inner.recv(tensors, peer, tag))

    def recv_anysource(self, tensors, tag=0):
        """Receive `tensors` from any rank through the inner group. Returns a `dist.Work`.

        Nothing is recorded: the sender is unknown, and this rank sends nothing.
        """
        # The peer is unknown, so there is no channel for the operation, which sends nothing.
        return self._inner.recv_anysource(tensors, tag)

    # -- the group itself ---------------------------------------------------------------------------------------------

    def getBackendName(self):
        """Return "recorded", the name of the backend in torch."""
        return NAME

    @property
    def group_name(self) -> str:
        """The unique name under which torch knows this group; torch does not set it for registered backends."""
        return self._name

    def _set_sequence_number_for_group(self):
        pass

    def shutdown(self):
        """Shut down the inner group."""
        self._inner.shutdown()

    def abort(self):
        """Abort the operations of the inner group and close its connections."""
        self._inner.abort()
