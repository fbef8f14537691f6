"""The process group of the backend shm: every method that torch 2.11 to 2.13 calls, on shared memory.

Tensors on CUDA go to an inner group, over nccl or staged through the host (`gpu`); the first operation on such a tensor
creates the inner group. So one group serves both devices (torch gives a group that is written in Python all devices).
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options are not in torch.distributed's own namespace

from minidist.tools.shm.gpu import route_by_device
from minidist.tools.shm.group_resources import GroupResources
from minidist.tools.shm.name import NAME
from minidist.tools.shm.operation_queue import OperationQueue
from minidist.tools.shm.reduce import Reduction
from minidist.tools.shm.tensor_views import (
    byte_view,
    check_part_sizes,
    describe_dtype_and_numel,
    describe_shape,
    memory_order_view,
    split_evenly_by_rank,
    split_rows_by_rank,
)
from minidist.tools.shm.unsupported import reject_unsupported_methods
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


@reject_unsupported_methods
class ShmGroup(dist.ProcessGroup):
    """The process group of the torch.distributed backend `shm`, which transfers CPU tensors through shared memory.

    torch.distributed calls its methods. Collectives, sends and receives return a `Work`. Ranks, roots and peers are
    group ranks; `opts` are torch's options of the operation, such as its root. Without async_op a collective runs in
    the calling thread if the group has no other operation in flight.

    resources: connections and memory of the group. name: the group's name in torch. make_cuda_group: takes this group
    and returns the process group for GPU tensors.
    """

    def __init__(
        self, resources: GroupResources, name: str, make_cuda_group: Callable[["ShmGroup"], dist.ProcessGroup]
    ):
        super().__init__(resources.rank, resources.size)
        self._resources, self._name, self._desc, self._make_cuda = resources, name, "", make_cuda_group
        self._size = resources.size
        self._cuda: dist.ProcessGroup | None = None
        self._coalesced: list[dist.Work] | None = None

    def get_cuda_group(self) -> dist.ProcessGroup:
        """Return the process group that transfers GPU tensors for this group. Collective: the first call creates it."""
        if self._cuda is None:
            self._cuda = self._make_cuda(self)
        return self._cuda

    def replace_last_coalesced_work(self, work: dist.Work) -> None:
        """Inside torch's coalescing manager, replace the work of the last operation by `work`, which wraps that work.

        Does nothing outside the coalescing manager.
        """
        if self._coalesced:
            self._coalesced[-1] = work

    def _run(self, opts, call: Callable[[], None], results: Sequence[Tensor] = ()) -> Work:
        """Run a collective after the queued ones: in the calling thread if it is synchronous and the queue is empty."""
        work = Work(self._resources.queue, functools.partial(self._resources.run_collective, call), results)
        return self._start_work(work, run_in_caller=not opts.asyncOp)

    def _start_work(self, work: Work, run_in_caller: bool) -> Work:
        """Start `work`; inside the coalescing manager, append it to the coalesced works instead of waiting for it."""
        self._resources.check_not_destroyed()
        work.start(run_in_caller and self._coalesced is None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # -- whole tensors ------------------------------------------------------------------------------------------------

    @route_by_device()
    def allreduce(self, tensors, opts=_ALLREDUCE):
        """Reduce each of `tensors` over the ranks, in place and in rank order. Collective; returns a `Work`."""
        reduction = Reduction(opts.reduceOp)
        todo = [
            (
                memory_order_view(tensor),
                f"all_reduce {reduction.name} {describe_dtype_and_numel(tensor)}",
                describe_shape(tensor),
            )
            for tensor in tensors
        ]

        def call() -> None:
            for whole, signature, shape in todo:
                self._resources.collectives.all_reduce(whole, reduction, signature, shape)

        return self._run(opts, call, tensors)

    def allreduce_coalesced(self, tensors, opts=_ALLREDUCECOALESCED):
        """Reduce each of `tensors` over the ranks, in place, as `allreduce` does. Collective; returns one `Work`."""
        return self.allreduce(tensors, opts)

    @route_by_device()
    def broadcast(self, tensors, opts=_BROADCAST):
        """Copy the tensor of group rank `opts.rootRank` to all ranks, in place. Collective; returns a `Work`."""
        root, tensor = opts.rootRank, tensors[opts.rootTensor]
        signature, whole = self._root_signature("broadcast", root, tensor), byte_view(tensor)
        call = functools.partial(self._resources.collectives.broadcast, whole, root, signature, describe_shape(tensor))
        return self._run(opts, call, tensors)

    @route_by_device()
    def reduce(self, tensors, opts=_REDUCE):
        """Reduce the tensor over the ranks into the tensor of group rank `opts.rootRank`. Collective; returns a `Work`.

        The reduction is in rank order. The tensors of other ranks do not change.
        """
        root, tensor, reduction = opts.rootRank, tensors[opts.rootTensor], Reduction(opts.reduceOp)
        signature, whole = self._root_signature(f"reduce {reduction.name}", root, tensor), memory_order_view(tensor)
        call = functools.partial(
            self._resources.collectives.all_reduce, whole, reduction, signature, describe_shape(tensor), root
        )
        return self._run(opts, call, tensors)

    def barrier(self, opts=_BARRIER):
        """Return a `Work` that completes once all ranks of the group have called this method. Collective."""
        return self._run(opts, self._resources.collectives.run_barrier)

    def monitored_barrier(self, timeout=timedelta(seconds=300), wait_all_ranks=False):
        """Block until all ranks have called this method; returns None, not a `Work`. Collective.

        After `timeout` (None: the group's timeout) raises ShmError, which names the first late rank, or all late ranks
        if `wait_all_ranks`.
        """
        limit_s = timeout.total_seconds() if timeout is not None else self._resources.barrier.timeout_s
        call = functools.partial(self._resources.barrier.monitored_barrier, limit_s, wait_all_ranks)
        work = Work(self._resources.queue, functools.partial(self._resources.run_collective, call))
        self._start_work(work, run_in_caller=True).wait()

    # -- all-gather ---------------------------------------------------------------------------------------------------

    @route_by_device()
    def allgather(self, outputs, inputs, opts=_ALLGATHER):
        """Copy `inputs[k]` of rank i to `outputs[k][i]` of every rank. Collective; returns a `Work`."""
        return self._all_gather_pairs(list(zip(outputs, inputs, strict=True)), opts)

    @route_by_device()
    def allgather_coalesced(self, outputs, inputs, opts=_ALLGATHER):
        """Copy `inputs[k]` of rank i to `outputs[i][k]` of every rank. Collective; returns a `Work`."""
        # torch gives one list of outputs per rank, each as long as the list of inputs.
        return self._all_gather_pairs([([out[i] for out in outputs], part) for i, part in enumerate(inputs)], opts)

    @route_by_device("_allgather_base")
    def all_gather_single(self, output, input, opts=_ALLGATHER):
        """Concatenate `input` of all ranks, in rank order, into `output` of every rank. Collective.

        Returns a `Work`.
        """
        return self._all_gather_pairs([(split_evenly_by_rank(output, input, self._size), input)], opts, [output])

    @route_by_device("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs, inputs, opts=_ALLGATHER):
        """Apply `all_gather_single` to each pair of `outputs` and `inputs`. Collective; returns one `Work`."""
        pairs = [(split_evenly_by_rank(o, i, self._size), i) for o, i in zip(outputs, inputs, strict=True)]
        return self._all_gather_pairs(pairs, opts, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_pairs(self, pairs, opts, results: Sequence[Tensor] | None = None) -> Work:
        """All-gather each pair (outputs, input tensor) as one collective; return its `Work`."""
        todo = []
        for outputs, tensor in pairs:
            check_part_sizes("all_gather", outputs, tensor, self._size)
            signature = f"all_gather {describe_dtype_and_numel(tensor)}"
            todo.append(([byte_view(out) for out in outputs], byte_view(tensor), signature, describe_shape(tensor)))

        def call() -> None:
            for parts, own, signature, shape in todo:
                self._resources.collectives.all_gather(parts, own, signature, shape)

        return self._run(opts, call, results or [out for outs, _ in pairs for out in outs])

    @route_by_device()
    def gather(self, outputs, inputs, opts=_GATHER):
        """Copy `inputs[0]` of rank i to `outputs[0][i]` of group rank `opts.rootRank`. Collective; returns a `Work`.

        Other ranks than the root pass an empty `outputs`.
        """
        root, tensor = opts.rootRank, inputs[0]
        signature, at_root = self._root_signature("gather", root, tensor), self._resources.rank == root
        if at_root:
            check_part_sizes("gather", outputs[0], tensor, self._size)
        parts = [byte_view(out) for out in outputs[0]] if at_root else None
        call = functools.partial(
            self._resources.collectives.all_gather, parts, byte_view(tensor), signature, describe_shape(tensor), root
        )
        return self._run(opts, call, outputs[0] if at_root else ())

    # -- reduce-scatter -----------------------------------------------------------------------------------------------

    @route_by_device()
    def reduce_scatter(self, outputs, inputs, opts=_REDUCESCATTER):
        """Reduce `inputs[k][i]` of all ranks into `outputs[k]` of rank i, in rank order. Collective.

        Returns a `Work`.
        """
        return self._reduce_scatter_pairs(list(zip(outputs, inputs, strict=True)), opts)

    @route_by_device("_reduce_scatter_base")
    def reduce_scatter_single(self, output, input, opts=_REDUCESCATTER):
        """Cut `input` into one equal part per rank; reduce part i, in rank order, into `output` of rank i.

        Collective; returns a `Work`.
        """
        return self._reduce_scatter_pairs([(output, split_evenly_by_rank(input, output, self._size))], opts)

    @route_by_device("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=_REDUCESCATTER):
        """Apply `reduce_scatter_single` to each pair of `outputs` and `inputs`. Collective; returns one `Work`."""
        return self._reduce_scatter_pairs(
            [(o, split_evenly_by_rank(i, o, self._size)) for o, i in zip(outputs, inputs, strict=True)], opts
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_pairs(self, pairs, opts) -> Work:
        """Reduce-scatter each pair (output, input tensors) as one collective; return its `Work`."""
        reduction, todo = Reduction(opts.reduceOp), []
        for output, inputs in pairs:
            check_part_sizes("reduce_scatter", inputs, output, self._size)
            signature = f"reduce_scatter {reduction.name} {describe_dtype_and_numel(output)}"
            todo.append(
                (
                    memory_order_view(output),
                    [memory_order_view(part) for part in inputs],
                    reduction,
                    signature,
                    describe_shape(output),
                )
            )

        def call() -> None:
            for one in todo:
                self._resources.collectives.reduce_scatter(*one)

        return self._run(opts, call, [output for output, _ in pairs])

    @route_by_device()
    def scatter(self, outputs, inputs, opts=_SCATTER):
        """Copy `inputs[0][i]` of group rank `opts.rootRank` to `outputs[0]` of rank i. Collective; returns a `Work`.

        Other ranks than the root pass an empty `inputs`.
        """
        root, output = opts.rootRank, outputs[0]
        signature, at_root = self._root_signature("scatter", root, output), self._resources.rank == root
        if at_root:
            check_part_sizes("scatter", inputs[0], output, self._size)
        parts = [byte_view(part) for part in inputs[0]] if at_root else None
        call = functools.partial(
            self._resources.collectives.scatter, byte_view(output), parts, root, signature, describe_shape(output)
        )
        return self._run(opts, call, outputs)

    # -- personalised -------------------------------------------------------------------------------------------------

    @route_by_device("alltoall_base")
    def all_to_all_single(self, output, input, output_splits, input_splits, opts=_ALLTOALL):
        """Send the j-th part of `input` to rank j; write the part from rank i as the i-th part of `output`. Collective.

        output_splits, input_splits: number of rows (slices of dimension 0) in each part, by group rank; empty for equal
        parts. Returns a `Work`.
        """
        parts = [
            split_rows_by_rank(tensor, splits, self._size)
            for tensor, splits in ((output, output_splits), (input, input_splits))
        ]
        return self._all_to_all_parts(*parts, output, opts, [output])

    alltoall_base = all_to_all_single

    @route_by_device()
    def alltoall(self, outputs, inputs, opts=_ALLTOALL):
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j; pairs may differ in size. Collective.

        Returns a `Work`.
        """
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(f"all_to_all takes a tensor per rank: {self._size}, not {len(tensors)}")
        return self._all_to_all_parts(
            [byte_view(t) for t in outputs], [byte_view(t) for t in inputs], inputs[0], opts, outputs
        )

    def _all_to_all_parts(self, outputs, inputs, like: Tensor, opts, results) -> Work:
        """Exchange flat parts, one per rank; return the `Work`. like: a tensor of their dtype."""
        signature = f"all_to_all {str(like.dtype).removeprefix('torch.')}"
        return self._run(
            opts, functools.partial(self._resources.collectives.all_to_all, outputs, inputs, signature), results
        )

    # -- transfers ----------------------------------------------------------------------------------------------------

    @route_by_device()
    def send(self, tensors, peer, tag=0):
        """Send `tensors[0]` to group rank `peer`. Returns a `Work` that completes once the receiver has the tensor."""
        return self._transfer("send", tensors, peer, tag)

    @route_by_device()
    def recv(self, tensors, peer, tag=0):
        """Receive into `tensors[0]` from group rank `peer`. Returns a `Work` that completes once the tensor is there.

        If the peer sends a tensor of another size or dtype, waiting raises ShmError on both ranks.
        """
        return self._transfer("recv", tensors, peer, tag)

    def _transfer(self, kind: str, tensors, peer: int, tag: int) -> Work:
        """Start a "send" or "recv" of the only tensor of `tensors` in the queue of this peer; return its `Work`."""
        if len(tensors) != 1:
            raise ValueError(f"{kind} takes one tensor, not {len(tensors)}")
        queue = self._resources.get_transfer_queue(kind, peer, tag)
        call = getattr(self._resources.transfers, kind)
        signature = f"{describe_dtype_and_numel(tensors[0]).split(' ')[0]} {describe_shape(tensors[0])}"
        work = Work(queue, functools.partial(call, byte_view(tensors[0]), signature, peer, tag), tensors, source=peer)
        return self._start_work(work, run_in_caller=False)

    # -- the group itself ---------------------------------------------------------------------------------------------

    def _start_coalescing(self, device):
        """Begin to collect works; torch calls this on entering its coalescing manager."""
        self._coalesced = []

    def _end_coalescing(self, device):
        """Return one `Work` that waits for all works collected since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        work = Work(OperationQueue(self._resources.workers), lambda: [one.wait() for one in works])
        work.start(run_in_caller=False)
        return work

    def getBackendName(self):
        """Return "shm", the name of the backend."""
        return NAME

    def name(self):
        """Return "shm", the name of the backend. For the name of this group see `group_name`."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed registers this group."""
        return self._name  # torch sets names only on groups that it builds itself

    @property
    def group_desc(self) -> str:
        """The description of this group that was passed to `new_group(group_desc=...)`; "" if there was none."""
        return self._desc

    def _set_group_desc(self, text):
        self._desc = text

    @property
    def _device_types(self):
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def _set_sequence_number_for_group(self):
        pass  # the barrier counts operations itself

    def _get_sequence_number_for_group(self):
        return self._resources.barrier.count

    def set_timeout(self, timeout):
        """Set how long later operations wait for another rank before they raise ShmError. timeout: a timedelta."""
        self._resources.set_timeout(timeout.total_seconds())

    def shutdown(self):
        """Leave the group on this rank and release its resources; `dist.destroy_process_group` calls this method.

        Waits up to two seconds for operations in flight; then they fail with ShmError.
        """
        if self._cuda is not None:
            self._cuda.shutdown()
        self._resources.close()

    def interrupt(self):
        """Make this rank's operations in flight and its later ones fail, as if all other ranks had left the group.

        May be called from any thread.
        """
        self._resources.disconnect_peers()

    def abort(self):
        """Leave the group on this rank and release its resources at once; operations in flight fail with ShmError."""
        if self._cuda is not None:
            self._cuda.abort()
        self._resources.close(patience_s=0.0)

    def _root_signature(self, words: str, root: int, tensor: Tensor) -> str:
        """Return the signature of an operation with a root. words: the operation's name and reduction."""
        return f"{words} root {self._resources.barrier.ranks[root]} {describe_dtype_and_numel(tensor)}"
