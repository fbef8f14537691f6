"""The recording backend of torch.distributed: a process group that records every operation and passes it on.

Everything built on torch.distributed goes through it (raw `dist` calls, DDP, FSDP2, DTensor), so the meter also sees
traffic that does not use `minidist.comm`. `register_recording_backend(meter)` registers the backend with torch as
"recorded". Groups with `backend="recorded"` write the records of `minidist.comm` and report to the rank status, so a
deadlock of raw calls is explained too.

torch calls a process group through method names that differ between releases (`_allgather_base` is `all_gather_single`
from 2.13 on); every name is overridden here, and a test compares them with torch's.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options are not in torch.distributed's own namespace

from minidist.comm.collectives import REDUCE_OPS
from minidist.comm.meter import Meter, Record
from minidist.comm.status import Channel, RankStatus
from minidist.tools.torch_group import create_torch_group

NAME = "recorded"
_NO_DESCRIPTION = ("undefined", "default_pg")  # torch's descriptions of groups without one


# Waits for a torch work handle; a duration of 0 means the group's own timeout.
WaitFunction = Callable[[dist.Work, timedelta], bool]


def register_recording_backend(
    meter: Meter, status: RankStatus | None = None, use: str = "torch", wait: WaitFunction | None = None
) -> str:
    """Register the backend "recorded" with torch and return its name. Call it once, before groups exist.

    meter: receives the records; status: receives the state of operations; use: the name of the group spec in records.
    wait: the wait function, for ranks that must be interruptible; by default torch's own blocking wait.
    """
    status = status if status is not None else RankStatus()

    def create(options, _backend_options) -> RecordingGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        inner = create_torch_group(options.store, options.group_rank, options.group_size, options.timeout)
        return RecordingGroup(inner, ranks, meter, status, use, options.group_id, wait or _wait)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    return NAME


def _wait(work: dist.Work, timeout: timedelta) -> bool:
    return work.wait(timeout) if timeout else work.wait()


class _RecordedWork(dist.Work):
    """A torch work handle whose wait is reported to the rank status and recorded in the meter."""

    def __init__(
        self, work: dist.Work, status: RankStatus, meter: Meter, at: tuple, record: Record, wait: WaitFunction
    ):
        super().__init__()
        self._work, self._status, self._meter, self._at, self._record = work, status, meter, at, record
        self._wait = wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._status.wait(*self._at)
        try:
            done = self._wait(self._work, timeout)
        finally:
            self._status.resume()
        self._meter.waited(self._record)
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
    """Records every operation and passes it to the process group `inner`."""

    def __init__(
        self,
        inner: dist.ProcessGroup,
        ranks: tuple[int, ...],
        meter: Meter,
        status: RankStatus,
        use: str,
        name: str,
        wait: WaitFunction = _wait,
    ):
        super().__init__(inner.rank(), inner.size())
        self._inner, self.ranks, self._meter, self._status = inner, ranks, meter, status
        self._name, self._wait = name, wait
        self._set_use(use)

    def _set_use(self, use: str) -> None:
        """Number groups of the same use and ranks in the order of creation, which is the same on all ranks."""
        there = [group for group in dist.distributed_c10d._world.pg_group_ranks if isinstance(group, RecordingGroup)]
        before = sum((group.base_use, group.ranks) == (use, self.ranks) for group in there if group is not self)
        self.base_use, self._use = use, f"{use} {before + 1}" if before else use

    def _set_group_desc(self, text: str) -> None:
        if text not in _NO_DESCRIPTION:  # without one the use stays as it is
            self._set_use(f"{self.base_use}: {text}")

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
        """Record `name` once per tensor in `counted`, with `numel` elements if given instead of the tensor's own.

        detail: what all ranks must agree on besides name, elements and dtype.
        """
        channel = channel or Channel("collective", self._use, self.ranks)
        signature = f"{name} {detail}".rstrip()
        for tensor in counted:
            shape = tuple(tensor.shape) if numel is None else (numel,)
            dtype = str(tensor.dtype).removeprefix("torch.")
            seq = self._status.launch(channel, signature, shape, dtype)
            record = self._meter.record(
                name,
                self._use,
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

    def _root(self, opts) -> dict:
        return {"root": opts.rootRank, "detail": f"root {self.ranks[opts.rootRank]}"}

    # -- whole tensors ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=c10d.AllreduceOptions()):
        return self._run(
            "all_reduce", tensors, lambda: self._inner.allreduce(tensors, opts), detail=_reduce_op_name(opts)
        )

    def allreduce_coalesced(self, tensors, opts=c10d.AllreduceCoalescedOptions()):
        return self._run(
            "all_reduce", tensors, lambda: self._inner.allreduce_coalesced(tensors, opts), detail=_reduce_op_name(opts)
        )

    def broadcast(self, tensors, opts=c10d.BroadcastOptions()):
        return self._run("broadcast", tensors, lambda: self._inner.broadcast(tensors, opts), **self._root(opts))

    def reduce(self, tensors, opts=c10d.ReduceOptions()):
        return self._run("reduce", tensors, lambda: self._inner.reduce(tensors, opts), **self._root(opts))

    def barrier(self, opts=c10d.BarrierOptions()):
        return self._run("barrier", [torch.empty(0)], lambda: self._inner.barrier(opts))

    # -- all-gather ---------------------------------------------------------------------------------------------------

    def allgather(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        numel = sum(part.numel() for part in outputs[0])
        return self._run("all_gather", inputs, lambda: self._inner.allgather(outputs, inputs, opts), numel=numel)

    def allgather_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        # The gathered tensor is counted: meta tensors stand for results that exist only as lists of parts.
        whole = [torch.empty(self.size() * x.numel(), dtype=x.dtype, device="meta") for x in inputs]
        return self._run("all_gather", whole, lambda: self._inner.allgather_coalesced(outputs, inputs, opts))

    def all_gather_single(self, output, input, opts=c10d.AllgatherOptions()):
        call = getattr(self._inner, "all_gather_single", None) or self._inner._allgather_base
        return self._run("all_gather", [output], lambda: call(output, input, opts))

    def all_gather_single_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        call = getattr(self._inner, "all_gather_single_coalesced", None) or self._inner.allgather_into_tensor_coalesced
        return self._run("all_gather", outputs, lambda: call(outputs, inputs, opts))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # -- reduce-scatter -----------------------------------------------------------------------------------------------

    def reduce_scatter(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        numel = sum(part.numel() for part in inputs[0])
        return self._run(
            "reduce_scatter", outputs, lambda: self._inner.reduce_scatter(outputs, inputs, opts),
            numel=numel, detail=_reduce_op_name(opts),
        )  # fmt: skip

    def reduce_scatter_single(self, output, input, opts=c10d.ReduceScatterOptions()):
        call = getattr(self._inner, "reduce_scatter_single", None) or self._inner._reduce_scatter_base
        return self._run("reduce_scatter", [input], lambda: call(output, input, opts), detail=_reduce_op_name(opts))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        call = (
            getattr(self._inner, "reduce_scatter_single_coalesced", None) or self._inner.reduce_scatter_tensor_coalesced
        )
        return self._run("reduce_scatter", inputs, lambda: call(outputs, inputs, opts), detail=_reduce_op_name(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- personalised -------------------------------------------------------------------------------------------------

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=c10d.AllToAllOptions()):
        call = getattr(self._inner, "all_to_all_single", None) or self._inner.alltoall_base
        row = input[0].numel() if input.dim() and input.shape[0] else 0
        splits = [rows * row for rows in input_splits] or None
        return self._run(
            "all_to_all", [input], lambda: call(output, input, output_splits, input_splits, opts), splits=splits
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=c10d.AllToAllOptions()):
        splits = [part.numel() for part in inputs]
        return self._run(
            "all_to_all", inputs[:1], lambda: self._inner.alltoall(outputs, inputs, opts),
            numel=sum(splits), splits=splits,
        )  # fmt: skip

    def gather(self, outputs, inputs, opts=c10d.GatherOptions()):
        return self._run("gather", inputs, lambda: self._inner.gather(outputs, inputs, opts), **self._root(opts))

    def scatter(self, outputs, inputs, opts=c10d.ScatterOptions()):
        return self._run("scatter", outputs, lambda: self._inner.scatter(outputs, inputs, opts), **self._root(opts))

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _transfer(self, kind: str, tensors, peer: int, tag: int, call) -> dist.Work:
        channel = Channel(kind, self._use, self.ranks, self.ranks[peer], tag)
        return self._run(kind, tensors, call, channel=channel)

    def send(self, tensors, peer, tag=0):
        return self._transfer("send", tensors, peer, tag, lambda: self._inner.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag=0):
        return self._transfer("recv", tensors, peer, tag, lambda: self._inner.recv(tensors, peer, tag))

    def recv_anysource(self, tensors, tag=0):
        # The peer is unknown, so the rank status has no channel for it; it sends nothing.
        return self._inner.recv_anysource(tensors, tag)

    # -- the group itself ---------------------------------------------------------------------------------------------

    def getBackendName(self):
        return NAME

    @property
    def group_name(self) -> str:
        return self._name  # torch does not name a group that a backend brings

    def _set_sequence_number_for_group(self):
        pass

    def shutdown(self):
        self._inner.shutdown()

    def abort(self):
        self._inner.abort()
