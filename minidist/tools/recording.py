"""The meter's lower mount: a process group beneath torch.distributed that counts what passes and hands it on.

Everything built on torch.distributed goes through it (a raw `dist` call, DDP, FSDP2, DTensor), so traffic can be judged
whose code never heard of the door. `mount(meter)` makes the backend known to torch as "recorded"; groups made with
`backend="recorded"` then write the door's own record type, and report to the rank status, so that a deadlock of
raw calls is explained too.

torch calls a group by method names that differ between releases (`_allgather_base` is `all_gather_single` from 2.13
on); every name is overridden here, and a test compares the table with what torch has.
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
_NO_DESCRIPTION = ("undefined", "default_pg")  # what torch says of a group when nobody has said anything


# How to wait for a work of torch; a duration of 0 is the group's own time-out.
Wait = Callable[[dist.Work, timedelta], bool]


def mount(meter: Meter, status: RankStatus | None = None, use: str = "torch", wait: Wait | None = None) -> str:
    """Make the backend "recorded" known to torch in this process and return its name. Call it once, before the groups.

    meter: receives the records; status: where the operations are reported; use: the records' group use.
    wait: how to wait, for ranks that must be able to stop waiting; by default inside torch until it is done.
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
    """torch's work, with the wait reported to the rank status and marked in the meter."""

    def __init__(self, work: dist.Work, status: RankStatus, meter: Meter, at: tuple, record: Record, wait: Wait):
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


def _how(opts) -> str:
    """How an operation reduces; a sum goes without saying."""
    names = [name for name, op in REDUCE_OPS.items() if opts.reduceOp == op and name != "sum"]
    return names[0] if names else ""


class RecordingGroup(dist.ProcessGroup):
    """Counts every operation and passes it to `inner`."""

    def __init__(
        self,
        inner: dist.ProcessGroup,
        ranks: tuple[int, ...],
        meter: Meter,
        status: RankStatus,
        use: str,
        name: str,
        wait: Wait = _wait,
    ):
        super().__init__(inner.rank(), inner.size())
        self._inner, self.ranks, self._meter, self._status = inner, ranks, meter, status
        self._name, self._wait = name, wait
        self._call(use)

    def _call(self, use: str) -> None:
        """Be told apart from groups of the same use and ranks by the order of making, the same on all of them."""
        there = [group for group in dist.distributed_c10d._world.pg_group_ranks if isinstance(group, RecordingGroup)]
        before = sum((group.called, group.ranks) == (use, self.ranks) for group in there if group is not self)
        self.called, self._use = use, f"{use} {before + 1}" if before else use

    def _set_group_desc(self, text: str) -> None:
        if text not in _NO_DESCRIPTION:  # the door counts under the plain name, one count more for each operation
            self._call(f"{self.called}: {text}")

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
        """Record `name` once per tensor in `counted`, with `numel` elements if the tensor itself is not the measure.

        detail: what all ranks must agree on besides name, elements and dtype.
        """
        channel = channel or Channel("collective", self._use, self.ranks)
        told = f"{name} {detail}".rstrip()
        for tensor in counted:
            shape = tuple(tensor.shape) if numel is None else (numel,)
            dtype = str(tensor.dtype).removeprefix("torch.")
            seq = self._status.launch(channel, told, shape, dtype)
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
        # Some backends do a small operation at once and have nothing to wait for.
        at = (channel, seq, told, shape, dtype)
        return work and _RecordedWork(work, self._status, self._meter, at, record, self._wait)

    def _root(self, opts) -> dict:
        return {"root": opts.rootRank, "detail": f"root {self.ranks[opts.rootRank]}"}

    # -- whole tensors ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=c10d.AllreduceOptions()):
        return self._run("all_reduce", tensors, lambda: self._inner.allreduce(tensors, opts), detail=_how(opts))

    def allreduce_coalesced(self, tensors, opts=c10d.AllreduceCoalescedOptions()):
        return self._run(
            "all_reduce", tensors, lambda: self._inner.allreduce_coalesced(tensors, opts), detail=_how(opts)
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
        # The count is that of the gathered tensor: meta tensors stand for results that exist only in parts.
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
            numel=numel, detail=_how(opts),
        )  # fmt: skip

    def reduce_scatter_single(self, output, input, opts=c10d.ReduceScatterOptions()):
        call = getattr(self._inner, "reduce_scatter_single", None) or self._inner._reduce_scatter_base
        return self._run("reduce_scatter", [input], lambda: call(output, input, opts), detail=_how(opts))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        call = (
            getattr(self._inner, "reduce_scatter_single_coalesced", None) or self._inner.reduce_scatter_tensor_coalesced
        )
        return self._run("reduce_scatter", inputs, lambda: call(outputs, inputs, opts), detail=_how(opts))

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
        # Whom it waits for is not known, so no channel of the status can stand for it; it sends nothing.
        return self._inner.recv_anysource(tensors, tag)

    # -- the group itself ---------------------------------------------------------------------------------------------

    def getBackendName(self):
        return NAME

    @property
    def group_name(self) -> str:
        return self._name  # torch names the groups that it builds itself, not one that a backend brings

    def _set_sequence_number_for_group(self):
        pass

    def shutdown(self):
        self._inner.shutdown()

    def abort(self):
        self._inner.abort()
