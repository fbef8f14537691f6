"""The process group: every method by which torch 2.11 to 2.13 calls one, on shared memory.

CUDA tensors go to a group over nccl that is made at the first of them, or through the host (`gpu`); so one group serves
both, whatever the string that it was asked for with (torch gives a group written in Python all devices).
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options are not in torch.distributed's own namespace

from minidist.tools.shm.device import by_device
from minidist.tools.shm.flat import as_bytes, check_parts, flat, named, parts_of, rows, split_rows
from minidist.tools.shm.lane import Lane
from minidist.tools.shm.members import Members
from minidist.tools.shm.name import NAME
from minidist.tools.shm.reduce import Reduction
from minidist.tools.shm.unsupported import refusing
from minidist.tools.shm.work import Work

_ALLTOALL = c10d.AllToAllOptions()
_ALLGATHER = c10d.AllgatherOptions()
_ALLREDUCECOALESCED = c10d.AllreduceCoalescedOptions()
_ALLREDUCE = c10d.AllreduceOptions()
_BARRIER = c10d.BarrierOptions()
_BROADCAST = c10d.BroadcastOptions()
_GATHER = c10d.GatherOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCESCATTER = c10d.ReduceScatterOptions()
_SCATTER = c10d.ScatterOptions()


@refusing
class ShmGroup(dist.ProcessGroup):
    """A group over shared memory. Every operation returns a `Work`."""

    def __init__(self, members: Members, name: str, make_cuda: Callable[["ShmGroup"], dist.ProcessGroup]):
        super().__init__(members.rank, members.size)
        self._members, self._name, self._desc, self._make_cuda = members, name, "", make_cuda
        self._size = members.size
        self._cuda: dist.ProcessGroup | None = None
        self._together: list[dist.Work] | None = None

    def on_cuda(self) -> dist.ProcessGroup:
        """What carries tensors on a GPU."""
        if self._cuda is None:
            self._cuda = self._make_cuda(self)
        return self._cuda

    def replace_last(self, work: dist.Work) -> None:
        """Of operations that are being put together, the last shall have ended when `work` has."""
        if self._together:
            self._together[-1] = work

    def _run(self, opts, call: Callable[[], None], results: Sequence[Tensor] = ()) -> Work:
        """Do a collective: in its turn, and in this thread if it is not asynchronous and nothing is before it."""
        work = Work(self._members.lane, functools.partial(self._members.collective, call), results)
        return self._begun(work, here=not opts.asyncOp)

    def _begun(self, work: Work, here: bool) -> Work:
        self._members.check_open()
        work.start(here and self._together is None)
        if self._together is not None:
            self._together.append(work)
        return work

    # -- whole tensors ------------------------------------------------------------------------------------------------

    @by_device()
    def allreduce(self, tensors, opts=_ALLREDUCE):
        how = Reduction(opts.reduceOp)
        todo = [(flat(tensor), f"all_reduce {how.name} {named(tensor)}", rows(tensor)) for tensor in tensors]

        def call() -> None:
            for whole, told, shown in todo:
                self._members.collectives.all_reduce(whole, how, told, shown)

        return self._run(opts, call, tensors)

    def allreduce_coalesced(self, tensors, opts=_ALLREDUCECOALESCED):
        return self.allreduce(tensors, opts)

    @by_device()
    def broadcast(self, tensors, opts=_BROADCAST):
        root, tensor = opts.rootRank, tensors[opts.rootTensor]
        told, whole = self._rooted("broadcast", root, tensor), as_bytes(tensor)
        call = functools.partial(self._members.collectives.broadcast, whole, root, told, rows(tensor))
        return self._run(opts, call, tensors)

    @by_device()
    def reduce(self, tensors, opts=_REDUCE):
        root, tensor, how = opts.rootRank, tensors[opts.rootTensor], Reduction(opts.reduceOp)
        told, whole = self._rooted(f"reduce {how.name}", root, tensor), flat(tensor)
        call = functools.partial(self._members.collectives.all_reduce, whole, how, told, rows(tensor), root)
        return self._run(opts, call, tensors)

    def barrier(self, opts=_BARRIER):
        return self._run(opts, self._members.collectives.barrier)

    def monitored_barrier(self, timeout=timedelta(seconds=300), wait_all_ranks=False):
        limit_s = timeout.total_seconds() if timeout is not None else self._members.meeting.timeout_s
        call = functools.partial(self._members.meeting.monitored, limit_s, wait_all_ranks)
        work = Work(self._members.lane, functools.partial(self._members.collective, call))
        self._begun(work, here=True).wait()

    # -- all-gather ---------------------------------------------------------------------------------------------------

    @by_device()
    def allgather(self, outputs, inputs, opts=_ALLGATHER):
        return self._gather_all(list(zip(outputs, inputs, strict=True)), opts)

    @by_device()
    def allgather_coalesced(self, outputs, inputs, opts=_ALLGATHER):
        # torch gives one list of outputs per rank, each as long as the list of inputs.
        return self._gather_all([([out[i] for out in outputs], part) for i, part in enumerate(inputs)], opts)

    @by_device("_allgather_base")
    def all_gather_single(self, output, input, opts=_ALLGATHER):
        return self._gather_all([(parts_of(output, input, self._size), input)], opts, [output])

    @by_device("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs, inputs, opts=_ALLGATHER):
        pairs = [(parts_of(o, i, self._size), i) for o, i in zip(outputs, inputs, strict=True)]
        return self._gather_all(pairs, opts, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, pairs, opts, results: Sequence[Tensor] | None = None) -> Work:
        todo = []
        for outputs, tensor in pairs:
            check_parts("all_gather", outputs, tensor, self._size)
            told = f"all_gather {named(tensor)}"
            todo.append(([as_bytes(out) for out in outputs], as_bytes(tensor), told, rows(tensor)))

        def call() -> None:
            for parts, own, told, shown in todo:
                self._members.collectives.all_gather(parts, own, told, shown)

        return self._run(opts, call, results or [out for outs, _ in pairs for out in outs])

    @by_device()
    def gather(self, outputs, inputs, opts=_GATHER):
        root, tensor = opts.rootRank, inputs[0]
        told, here = self._rooted("gather", root, tensor), self._members.rank == root
        if here:
            check_parts("gather", outputs[0], tensor, self._size)
        parts = [as_bytes(out) for out in outputs[0]] if here else None
        call = functools.partial(
            self._members.collectives.all_gather, parts, as_bytes(tensor), told, rows(tensor), root
        )
        return self._run(opts, call, outputs[0] if here else ())

    # -- reduce-scatter -----------------------------------------------------------------------------------------------

    @by_device()
    def reduce_scatter(self, outputs, inputs, opts=_REDUCESCATTER):
        return self._scatter_sums(list(zip(outputs, inputs, strict=True)), opts)

    @by_device("_reduce_scatter_base")
    def reduce_scatter_single(self, output, input, opts=_REDUCESCATTER):
        return self._scatter_sums([(output, parts_of(input, output, self._size))], opts)

    @by_device("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=_REDUCESCATTER):
        return self._scatter_sums([(o, parts_of(i, o, self._size)) for o, i in zip(outputs, inputs, strict=True)], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, pairs, opts) -> Work:
        how, todo = Reduction(opts.reduceOp), []
        for output, inputs in pairs:
            check_parts("reduce_scatter", inputs, output, self._size)
            told = f"reduce_scatter {how.name} {named(output)}"
            todo.append((flat(output), [flat(part) for part in inputs], how, told, rows(output)))

        def call() -> None:
            for one in todo:
                self._members.collectives.reduce_scatter(*one)

        return self._run(opts, call, [output for output, _ in pairs])

    @by_device()
    def scatter(self, outputs, inputs, opts=_SCATTER):
        root, output = opts.rootRank, outputs[0]
        told, here = self._rooted("scatter", root, output), self._members.rank == root
        if here:
            check_parts("scatter", inputs[0], output, self._size)
        parts = [as_bytes(part) for part in inputs[0]] if here else None
        call = functools.partial(self._members.collectives.scatter, as_bytes(output), parts, root, told, rows(output))
        return self._run(opts, call, outputs)

    # -- personalised -------------------------------------------------------------------------------------------------

    @by_device("alltoall_base")
    def all_to_all_single(self, output, input, output_splits, input_splits, opts=_ALLTOALL):
        parts = [
            split_rows(tensor, splits, self._size)
            for tensor, splits in ((output, output_splits), (input, input_splits))
        ]
        return self._exchange(*parts, output, opts, [output])

    alltoall_base = all_to_all_single

    @by_device()
    def alltoall(self, outputs, inputs, opts=_ALLTOALL):
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(f"all_to_all takes a tensor per rank: {self._size}, not {len(tensors)}")
        return self._exchange([as_bytes(t) for t in outputs], [as_bytes(t) for t in inputs], inputs[0], opts, outputs)

    def _exchange(self, outputs, inputs, like: Tensor, opts, results) -> Work:
        told = f"all_to_all {str(like.dtype).removeprefix('torch.')}"
        return self._run(opts, functools.partial(self._members.collectives.all_to_all, outputs, inputs, told), results)

    # -- transfers ----------------------------------------------------------------------------------------------------

    @by_device()
    def send(self, tensors, peer, tag=0):
        return self._transfer("send", tensors, peer, tag)

    @by_device()
    def recv(self, tensors, peer, tag=0):
        return self._transfer("recv", tensors, peer, tag)

    def _transfer(self, kind: str, tensors, peer: int, tag: int) -> Work:
        if len(tensors) != 1:
            raise ValueError(f"{kind} takes one tensor, not {len(tensors)}")
        lane = self._members.channel(kind, peer, tag)
        call = getattr(self._members.transfers, kind)
        told = f"{named(tensors[0]).split(' ')[0]} {rows(tensors[0])}"
        work = Work(lane, functools.partial(call, as_bytes(tensors[0]), told, peer, tag), tensors, source=peer)
        return self._begun(work, here=False)

    # -- the group itself ---------------------------------------------------------------------------------------------

    def _start_coalescing(self, device):
        self._together = []

    def _end_coalescing(self, device):
        works, self._together = self._together or [], None
        work = Work(Lane(self._members.workers), lambda: [one.wait() for one in works])
        work.start(here=False)
        return work

    def getBackendName(self):
        return NAME

    def name(self):
        return NAME

    @property
    def group_name(self) -> str:
        return self._name  # torch names the groups that it builds itself, not one that a backend brings

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, text):
        self._desc = text

    @property
    def _device_types(self):
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def _set_sequence_number_for_group(self):
        pass  # a meeting counts by itself

    def _get_sequence_number_for_group(self):
        return self._members.meeting.count

    def set_timeout(self, timeout):
        self._members.set_timeout(timeout.total_seconds())

    def shutdown(self):
        if self._cuda is not None:
            self._cuda.shutdown()
        self._members.close()

    def abort(self):
        if self._cuda is not None:
            self._cuda.abort()
        self._members.close(patience_s=0.0)

    def _rooted(self, words: str, root: int, tensor: Tensor) -> str:
        return f"{words} root {self._members.meeting.ranks[root]} {named(tensor)}"
